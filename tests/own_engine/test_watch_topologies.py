"""Watching engines of several workers, engines that fail, and several engines: each rank of each start has a file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.engine.conftest import sidecar_beside, wait_for
from tests.engine.test_two_ranks_recorders import core_of, wait_for_incident
from tests.engines import send_texts, watching, worker_pids
from tests.unit.worker_ext.ring_bytes import parse, table

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

PHASES = ["before", "init", "weights", "profile", "kv_cache", "warm_up"]


def heads(rings: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each file's identity and the phases in it."""
    return [(parse(path)[0], table(path)[0]["start"]) for path in sorted(rings.glob("*.ring"))]


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"tensor_parallel": 2}, [(0, 0), (0, 1)]),
        ({"data_parallel": 2}, [(0, 0), (1, 0)]),
    ],
    ids=["two shards", "two replicas"],
)
async def test_every_rank_is_seen(engine_factory: Callable[..., DemoEngine], tmp_path: Path, options, ranks) -> None:
    """Those of other replicas too, which vLLM's worker calls never return; all have the name of one engine's life."""
    rings = tmp_path / "rings"
    with engine_factory(multimodal=False, **options, **watching(rings)) as engine:
        written = heads(rings)
        assert sorted((identity["dp_rank"], identity["rank"]) for identity, _ in written) == ranks
        assert sorted(identity["pid"] for identity, _ in written) == sorted(worker_pids(engine))
        assert len({identity["instance"] for identity, _ in written}) == 1
        assert [[phase["name"] for phase in phases] for _, phases in written] == [PHASES] * 2
        with sidecar_beside(engine, tmp_path, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar:
            assert (await send_texts(engine.url, engine.served_model, texts=["hello"])).errors == ()
            report = wait_for(sidecar, lambda report: report["ranks_reported"] == 2)
            assert (report["ranks_expected"], report["ranks_missing"]) == (2, [])
            assert all(rank["components"]["kv_cache_bytes"] > 0 for rank in report["ranks"])
            if "tensor_parallel" in options:
                assert_a_planned_stop_is_no_incident(engine, sidecar)


def assert_a_planned_stop_is_no_incident(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    """EngineCore has `--shutdown-timeout` for its workers, and outlives them."""
    engine.stop()
    wait_for(sidecar, lambda report: report["engine"]["state"] == "gone")
    events = sidecar.call("GET", "/memory/events")["events"]
    assert any("the engine ended in order" in event["summary"] for event in events), events
    assert sidecar.call("GET", "/memory/incidents")["incidents"] == []


async def test_an_engine_core_that_is_killed_is_an_incident(
    engine_factory: Callable[..., DemoEngine], tmp_path: Path
) -> None:
    """Its workers then end by themselves, as they do in a planned stop; nobody reads the engine's log here."""
    rings = tmp_path / "rings"
    with (
        engine_factory(multimodal=False, tensor_parallel=2, **watching(rings)) as engine,
        sidecar_beside(engine, tmp_path, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar,
    ):
        report = wait_for(sidecar, lambda report: report["ranks_reported"] == 2)
        os.kill(core_of(report["ranks"][0]["pid"]), signal.SIGKILL)
        incident = wait_for_incident(sidecar, lambda one: one["kind"] == "died")
        assert "ended" not in {rank["status"] for rank in incident["ranks"]}


async def test_an_engine_whose_recorders_cannot_write_serves_all_the_same(
    engine_factory: Callable[..., DemoEngine], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with engine_factory(multimodal=False, **watching(tmp_path / "file" / "rings")) as engine:
        assert (await send_texts(engine.url, engine.served_model, texts=["hello"])).errors == ()
        log = engine.log_path.read_text()
    (line,) = [line for line in log.splitlines() if "Highwater" in line]
    assert f"recorder was not started: the recorder's file {tmp_path}/file/rings" in line


def test_a_start_that_fails_again_and_again_leaves_each_reason(
    engine_factory: Callable[..., DemoEngine], tmp_path: Path
) -> None:
    rings = tmp_path / "rings"
    for _ in range(2):
        with pytest.raises(DemoError):
            engine_factory(multimodal=False, extra_args=("--load-format", "auto"), **watching(rings))
    written = heads(rings)
    assert len({identity["instance"] for identity, _ in written}) == 2
    for _, phases in written:
        assert [phase["name"] for phase in phases] == PHASES[:3]
        assert "weights" in phases[-1]["error"]


async def test_of_two_engines_in_one_folder_neither_is_taken_for_the_other(
    engine_factory: Callable[..., DemoEngine], tmp_path: Path
) -> None:
    rings = tmp_path / "rings"
    with (
        engine_factory(multimodal=False, **watching(rings)) as one,
        engine_factory(multimodal=False, **watching(rings)),
    ):
        assert len({identity["instance"] for identity, _ in heads(rings)}) == 2
        with sidecar_beside(one, tmp_path, HIGHWATER_RECORDER_DIR=str(rings)) as sidecar:
            report = wait_for(sidecar, lambda report: report["engine"]["hint"] is not None)
            assert report["ranks"] == []
            assert "recorders of 2 engines; give each a folder of its own" in json.dumps(report)
