"""One real engine from its start to its death, beside a sidecar.

It has the plugin and development mode, and no flag: it is watched without a call, serves through the proxy, gives
memory back, and is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.process import DemoError, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import send_images
from highwater.watch.round import COUNTS_SETTLE_SECONDS, IDLE_REQUEST_SECONDS
from tests.engines import worker_pids
from tests.patience import LIMIT_SECONDS

from .conftest import wait_for

WATCHED_SECONDS = 20.0
CALL, COUNTS, PAUSE = '"POST /collective_rpc', '"GET /metrics', '"GET /is_paused'


class Plugged(NamedTuple):
    """The engine, the sidecar that was there before it, and what that reported while the engine loaded."""

    engine: DemoEngine
    sidecar: DemoSidecar
    loading: list[dict[str, Any]]


def come_up(sidecar: DemoSidecar, start: Callable[..., DemoEngine], **options: object) -> Plugged:
    loading: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(partial(start, extension=False, plugin=True, **options))
        while not starting.done():
            loading.append(sidecar.call("GET", "/memory"))
            time.sleep(0.2)
        return Plugged(starting.result(), sidecar, loading)


@pytest.fixture(scope="module")
def plugged(
    engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Plugged, Callable[..., Plugged]]]:
    """An engine whose workers record themselves and may be called, and a way to start another in its place."""
    folder: Path = tmp_path_factory.mktemp("plugged")
    port, rings = free_port(), str(folder / "rings")
    settings = {"HIGHWATER_RECORDER_DIR": rings, "HIGHWATER_POLICY__MODE": "observe"}
    with DemoSidecar(f"http://127.0.0.1:{port}", folder=folder, settings=settings) as sidecar:
        again = partial(come_up, sidecar, engine_factory, port=port, extra_env=(("HIGHWATER_RECORDER_DIR", rings),))
        made = again()
        wait_for(sidecar, lambda report: report["engine"]["state"] == "ready" and report["ranks_reported"] == 1)
        yield made, again
        made.engine.stop()


def asked(engine: DemoEngine, what: str) -> int:
    return engine.log_path.read_text().count(what)


def watch(sidecar: DemoSidecar, seconds: float) -> list[dict[str, Any]]:
    until, reports = time.monotonic() + seconds, []
    while time.monotonic() < until:
        reports.append(sidecar.call("GET", "/memory"))
        time.sleep(0.5)
    return reports


def test_an_engine_that_loads_is_watched(plugged):
    _, sidecar, loading = plugged[0]
    shown = [report for report in loading if report["ranks"] and not report["stale"]]
    assert {report["engine"]["state"] for report in shown} == {"starting"}
    seen = {phase["name"] for report in shown for phase in report["ranks"][0]["start"]}
    assert {"init", "weights", "profile"} <= seen
    assert all(report["engine"]["hint"].startswith("the engine is loading (") for report in shown)
    report = sidecar.call("GET", "/memory")
    assert (report["engine"]["restarts"], report["growth"]["reason"], report["start_failure"]) == (0, None, None)


def test_an_idle_engine_is_watched_without_a_call(plugged):
    """Its API server is asked once in 15 seconds, its workers never; every reading is fresh."""
    engine, sidecar, _ = plugged[0]
    watch(sidecar, COUNTS_SETTLE_SECONDS + 2)
    before, began = (asked(engine, COUNTS), asked(engine, PAUSE)), time.monotonic()
    reports = watch(sidecar, WATCHED_SECONDS)
    most = 1 + (time.monotonic() - began) / IDLE_REQUEST_SECONDS
    assert asked(engine, CALL) == 0
    assert asked(engine, COUNTS) - before[0] <= most
    assert asked(engine, PAUSE) - before[1] <= most
    # A sidecar that stands still for a moment has one old report; without recorders every second one would be old.
    fresh = [report for report in reports if report["age_seconds"] < 3.0 and not report["stale"]]
    assert len(fresh) > 0.8 * len(reports)
    assert {report["engine"]["state"] for report in reports} == {"ready"}
    assert {report["ranks"][0]["source"] for report in reports} == {"recorder"}


def test_an_engine_at_work_is_watched_without_a_call(plugged):
    engine, sidecar, _ = plugged[0]
    before = sidecar.call("GET", "/memory")["ranks"][0]["encoder_cache"]["entries"]
    asyncio.run(send_images(sidecar.url, engine.served_model, images=range(81_000, 81_010)))
    report = wait_for(sidecar, lambda report: report["ranks"][0]["encoder_cache"]["entries"] > before)
    assert (report["stale"], report["ranks"][0]["source"], asked(engine, CALL)) == (False, "recorder", 0)


def test_memory_is_given_back_by_the_plugin_alone(plugged):
    """No class was named: every rank's recorder says that its worker may be called."""
    engine, sidecar, _ = plugged[0]
    report = sidecar.call("GET", "/memory")
    assert report["engine"]["capabilities"]["extension"] is None
    assert report["engine"]["capabilities"]["collective_rpc"] is True
    (result,) = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"]})["results"]
    assert (result["outcome"], result["reason"]) == ("done", None)
    assert asked(engine, CALL) > 0


def test_an_engine_that_is_killed_is_told_from_one_that_is_slow(plugged):
    engine, sidecar, _ = plugged[0]
    (pid,) = worker_pids(engine)
    os.kill(pid, signal.SIGKILL)
    wait_for(sidecar, lambda report: report["engine"]["state"] == "gone")
    assert httpx.get(f"{sidecar.url}/health/deep", trust_env=False, timeout=LIMIT_SECONDS).status_code == 503
    # A machine without time for the engine may have had it stand still before.
    wait_for(sidecar, lambda _: "died" in kinds_of_incidents(sidecar))


def test_a_start_that_fails_leaves_its_phases(plugged):
    (engine, sidecar, _), again = plugged
    engine.stop()
    wait_for(sidecar, lambda report: report["engine"]["state"] == "gone")
    with pytest.raises(DemoError):
        again(extra_args=("--kv-cache-memory-bytes", "1"))
    report = wait_for(sidecar, lambda report: report["start_failure"] is not None)
    (rank,) = report["start_failure"]["ranks"]
    assert [phase["name"] for phase in rank["phases"] if phase["name"] in {"init", "weights"}] == ["init", "weights"]
    assert "warm_up" not in {phase["name"] for phase in rank["phases"]}
    assert report["start_failure"]["summary"] in [event["summary"] for event in events(sidecar)]


def kinds_of_incidents(sidecar: DemoSidecar) -> set[str]:
    return {incident["kind"] for incident in sidecar.call("GET", "/memory/incidents")["incidents"]}


def events(sidecar: DemoSidecar) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = sidecar.call("GET", "/memory/events")["events"]
    return told
