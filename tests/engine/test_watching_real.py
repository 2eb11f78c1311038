"""A real engine with the plugin and development mode, and no flag: watched without a call, and acted on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from highwater.demo.traffic import send_images
from highwater.memory.due import IDLE_SECONDS, SETTLE_SECONDS

from .conftest import sidecar_beside, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from highwater.demo.engine import Engine
    from highwater.demo.sidecar import DemoSidecar

WATCHED_SECONDS = 20.0
CALL, COUNTS, PAUSE = '"POST /collective_rpc', '"GET /metrics', '"GET /is_paused'


@pytest.fixture(scope="module")
def plugged(
    engine_factory: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, DemoSidecar]]:
    """An engine whose workers record themselves and may be called, and a sidecar that was there before it."""
    folder: Path = tmp_path_factory.mktemp("plugged")
    environ = (("HIGHWATER_RECORDER_DIR", str(folder / "rings")),)
    engine = engine_factory(extension=False, plugin=True, extra_env=environ)
    settings = {"HIGHWATER_RECORDER_DIR": str(folder / "rings"), "HIGHWATER_POLICY__MODE": "observe"}
    with sidecar_beside(engine, folder, **settings) as sidecar:
        wait_for(sidecar, lambda report: report["ranks_reported"] == 1)
        yield engine, sidecar
    engine.stop()


def asked(engine: Engine, what: str) -> int:
    """How often the API server's own access log has this request."""
    return engine.log_path.read_text().count(what)


def watch(sidecar: DemoSidecar, seconds: float) -> list[dict[str, Any]]:
    """The reports of so many seconds."""
    until, reports = time.monotonic() + seconds, []
    while time.monotonic() < until:
        reports.append(sidecar.call("GET", "/memory"))
        time.sleep(0.5)
    return reports


def test_an_idle_engine_is_watched_without_a_call(plugged):
    """Its API server is asked once in 15 seconds, its workers never; every reading is fresh."""
    engine, sidecar = plugged
    watch(sidecar, SETTLE_SECONDS + 2)
    before = asked(engine, COUNTS), asked(engine, PAUSE)
    reports = watch(sidecar, WATCHED_SECONDS)
    most = 1 + WATCHED_SECONDS / IDLE_SECONDS
    assert asked(engine, CALL) == 0
    assert asked(engine, COUNTS) - before[0] <= most
    assert asked(engine, PAUSE) - before[1] <= most
    assert {report["stale"] for report in reports} == {False}
    assert max(report["age_seconds"] for report in reports) < 3.0
    assert {report["engine"]["state"] for report in reports} == {"ready"}
    assert {report["ranks"][0]["source"] for report in reports} == {"recorder"}


def test_an_engine_at_work_is_watched_without_a_call(plugged):
    """What images leave on the device is seen as it comes."""
    engine, sidecar = plugged
    before = sidecar.call("GET", "/memory")["ranks"][0]["encoder_cache"]["entries"]
    asyncio.run(send_images(sidecar.url, engine.served_model, images=range(81_000, 81_010)))
    report = wait_for(sidecar, lambda report: report["ranks"][0]["encoder_cache"]["entries"] > before, 10.0)
    assert (report["stale"], report["ranks"][0]["source"], asked(engine, CALL)) == (False, "recorder", 0)


def test_memory_is_given_back_by_the_plugin_alone(plugged):
    """No class was named: every rank's recorder says that its worker may be called."""
    engine, sidecar = plugged
    report = sidecar.call("GET", "/memory")
    assert report["engine"]["capabilities"]["extension"] is None
    assert report["engine"]["capabilities"]["collective_rpc"] is True
    (result,) = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"]})["results"]
    assert (result["outcome"], result["reason"]) == ("done", None)
    assert asked(engine, CALL) > 0
