"""A real engine's budget explained: every number is the engine's own log line or metric, and the sums are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from highwater.demo.process import free_port
from highwater.demo.sidecar import DemoSidecar
from tests.engine.conftest import wait_for
from tests.engine.explained import assert_pool_is_the_engines, assert_sums_are_exact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from highwater.demo.engine import DemoEngine


@pytest.fixture(scope="module")
def explained(
    engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DemoEngine, DemoSidecar, dict[str, Any]]]:
    """An engine that is only watched, its sidecar, and what that explains."""
    folder: Path = tmp_path_factory.mktemp("explained")
    port, rings = free_port(), str(folder / "rings")
    settings = {"HIGHWATER_RECORDER_DIR": rings, "HIGHWATER_POLICY__MODE": "observe"}
    with DemoSidecar(f"http://127.0.0.1:{port}", folder=folder, settings=settings) as sidecar:
        extra = (("HIGHWATER_RECORDER_DIR", rings), ("TASK_QUEUE_ENABLE", "2"))
        engine = engine_factory(extension=False, plugin=True, port=port, extra_env=extra)
        wait_for(sidecar, lambda report: report["engine"]["state"] == "ready" and report["ranks_reported"] == 1)
        yield engine, sidecar, sidecar.call("GET", "/memory/budget")
        engine.stop()


def test_the_pool_is_the_engines_own(explained, engine_environment):
    engine, _, answer = explained
    assert_pool_is_the_engines(engine, answer, engine_environment.version)


def test_the_parts_sum_exactly(explained):
    assert_sums_are_exact(explained[2])


def test_what_is_not_known_is_null(explained):
    """A CPU engine with a given KV cache profiles nothing: no figure of that is 0."""
    (rank,) = explained[2]["explanation"]["ranks"]
    assert (rank["requested_bytes"], rank["fully_counted_bytes"], rank["left_bytes"]) == (None, None, None)
    assert (rank["observed"], rank["uncounted"]) == ([], [])
    assert rank["environment"]["TASK_QUEUE_ENABLE"] == "2"


def test_the_encoders_budget_is_the_schedulers(explained):
    """As the entries' capacity has it."""
    _, sidecar, answer = explained
    report = sidecar.call("GET", "/memory")
    encoder = answer["explanation"]["encoder"]
    assert encoder["cache_size"] == report["ranks"][0]["encoder_cache"]["capacity_embeds"]
    assert 0 < encoder["item_tokens"] <= encoder["cache_size"]
    assert encoder["cache_bytes"] > 0


def test_no_worker_is_called_for_it(explained):
    engine, sidecar, _ = explained
    for _ in range(5):
        sidecar.call("GET", "/memory/budget")
    assert '"POST /collective_rpc' not in engine.log_path.read_text()
