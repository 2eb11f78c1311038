"""Recorders beside real engines: every rank is heard of, a hang is told from work, a death is kept."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from highwater.model.rank import rank_title
from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.engines import worker_pids
from tests.patience import LIMIT_SECONDS

from .conftest import MOST_TOKENS, PATIENT, ask_all, sidecar_beside, wait_for
from .test_sidecar import cpu_seconds, rss_bytes

pytestmark = pytest.mark.xdist_group("two_workers")

PATIENCE_SECONDS = 240.0
IDLE_SECONDS = 8.0
WELL = {"/livez": 200, "/readyz": 200, "/health/deep": 200}
NOT_WELL = {"/livez": 200, "/readyz": 503, "/health/deep": 503}
on_two_engines = pytest.mark.parametrize("engine", ["two engines"], indirect=True)
on_two_workers = pytest.mark.parametrize("engine", ["two workers"], indirect=True)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, engine_factory: Callable[..., DemoEngine]) -> Iterator[DemoEngine]:
    """Two engines with a rank each, or one with two."""
    if request.param == "two engines":
        engine = engine_factory(multimodal=False, data_parallel=2)
    else:
        engine = request.getfixturevalue("two_workers")
    yield engine
    engine.stop()


@on_two_engines
def test_without_recorders_two_engines_are_counted_although_one_answers(engine: DemoEngine, tmp_path: Path) -> None:
    """vLLM returns engine 0 only: the report says 1 of 2, and why."""
    with sidecar_beside(engine, tmp_path) as sidecar:
        report = wait_for(sidecar, lambda report: report["ranks_reported"] > 0)
        assert (report["ranks_reported"], report["ranks_expected"]) == (1, 2)
        assert "data-parallel" in report["engine"]["hint"]


@contextmanager
def flying(engine: DemoEngine, folder: Path, **settings: str) -> Iterator[DemoSidecar]:
    """A sidecar that acts only when told to, and hears of both ranks.

    The recorders that the first one starts outlive it, and the next one reads them on.
    """
    settings = {
        "HIGHWATER_POLICY__MODE": "observe",
        "HIGHWATER_RECORDER_DIR": str(engine.folder / "recorders"),
        "HIGHWATER_ENGINE_LOG": str(engine.log_path),
        **settings,
    }
    with sidecar_beside(engine, folder, **settings) as sidecar:
        # A start of recorders that a busy engine answered late is tried again after half a minute.
        wait_for(sidecar, lambda report: report["ranks_reported"] == 2 and report["progress"] is not None)
        yield sidecar


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def status(url: str) -> int:
    return httpx.get(url, trust_env=False, timeout=LIMIT_SECONDS).status_code


def probes(sidecar: DemoSidecar) -> dict[str, int]:
    return {path: status(sidecar.url + path) for path in WELL}


def is_ready(report: dict[str, Any]) -> bool:
    return bool(report["engine"]["state"] == "ready")


def is_unresponsive(report: dict[str, Any]) -> bool:
    return bool(report["engine"]["state"] in {"stuck", "not_answering"})


def incidents(sidecar: DemoSidecar) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = sidecar.call("GET", "/memory/incidents")["incidents"]
    return listed


def wait_for_incident(
    sidecar: DemoSidecar, wanted: Callable[[dict[str, Any]], bool], seconds: float = PATIENCE_SECONDS
) -> dict[str, Any]:
    """The first incident that is as wanted, whole: it is written beside the loop that tells the state."""
    deadline = time.monotonic() + seconds
    while True:
        found = [headline for headline in incidents(sidecar) if wanted(headline)]
        if found:
            incident: dict[str, Any] = sidecar.call("GET", f"/memory/incidents/{found[-1]['id']}")
            return incident
        assert time.monotonic() < deadline, incidents(sidecar)
        time.sleep(0.2)


def core_of(worker_pid: int) -> int:
    """The process of the worker's loop, which started it."""
    core = psutil.Process(worker_pid).parent()
    assert core is not None
    assert "VLLM::EngineCore" in core.cmdline()[0]
    return core.pid


def worker_calls(engine: DemoEngine) -> int:
    return engine.log_path.read_text(errors="replace").count("POST /collective_rpc")


# --- who is heard of ---


@on_two_engines
def test_every_rank_is_heard_of_although_the_first_engine_alone_answers(engine: DemoEngine, tmp_path: Path) -> None:
    with flying(engine, tmp_path, **PATIENT) as sidecar:
        report = wait_for(sidecar, lambda report: report["ranks_reported"] == 2)
        assert (report["ranks_expected"], report["ranks_missing"], report["engine"]["hint"]) == (2, [], None)
        ranks = report["ranks"]
        assert [(rank["dp_rank"], rank["tp_rank"], rank["pp_rank"]) for rank in ranks] == [(0, 0, 0), (1, 0, 0)]
        assert sorted(rank["pid"] for rank in ranks) == sorted(worker_pids(engine))
        for rank in ranks:
            assert f"(EngineCore_DP{rank['dp_rank']} pid={core_of(rank['pid'])})" in engine.log_path.read_text()
        assert ranks[0]["source"] in {"rpc", "recorder"}
        assert ranks[1]["source"] == "recorder"
        for rank in ranks:
            assert rank["used_bytes"] == pytest.approx(rss_bytes(rank["pid"]), rel=0.1)
            assert sum(value or 0 for value in rank["components"].values()) == rank["used_bytes"]
        (result,) = sidecar.call("POST", "/memory/reclaim", {"remedies": ["release"]})["results"]
        assert result["outcome"] == "done"
        assert [rank["dp_rank"] for rank in result["freed_bytes"]["ranks"]] == [0, 1]


def see_a_stopped_worker_hang(engine: DemoEngine, tmp_path: Path) -> None:
    """The rank is named while vLLM's own health check is good, and an incident has a beginning and an end."""
    with flying(engine, tmp_path) as sidecar:
        pids = [rank["pid"] for rank in sidecar.call("GET", "/memory")["ranks"]]
        # Steps for the series to show: an idle worker has nothing new to record. Each replica gets one of the two.
        body = {"model": engine.served_model, "prompt": "x", "max_tokens": 60, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda _: httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60), range(2)))
        with stopped(pids[1]):
            report = wait_for(sidecar, is_unresponsive, PATIENCE_SECONDS)
            (missing,) = report["ranks_missing"]
            assert (missing["pid"], missing["status"]) == (pids[1], "stopped")
            name = rank_title(missing["dp_rank"], missing["rank"])
            assert re.search(rf"rank {name} \(pid {pids[1]} on \S+\) is stopped", report["engine"]["hint"])
            assert (probes(sidecar), status(f"{engine.url}/health")) == (NOT_WELL, 200)
            incident = wait_for_incident(sidecar, lambda incident: incident["kind"] == "hung")
            assert incident["ended_at"] is None
            found = [(rank["pid"], rank["status"], len(rank["series"]) > 1) for rank in incident["ranks"]]
            assert found == [(pids[0], "alive", True), (pids[1], "stopped", True)]
        wait_for(sidecar, is_ready, PATIENCE_SECONDS)
        ended = wait_for_incident(sidecar, lambda incident: incident["ended_at"] is not None)
        assert (ended["id"], len(incidents(sidecar))) == (incident["id"], 1)
        wait_for(sidecar, lambda report: report["ranks_reported"] == 2 and not report["ranks_missing"])
        assert (probes(sidecar), status(f"{engine.url}/health")) == (WELL, 200)


@on_two_engines
def test_a_stopped_worker_of_two_engines_is_a_hang_until_it_goes_on(engine: DemoEngine, tmp_path: Path) -> None:
    see_a_stopped_worker_hang(engine, tmp_path)


@on_two_workers
def test_an_idle_engine_does_not_hang_and_is_left_alone(engine: DemoEngine, tmp_path: Path) -> None:
    """Files are read instead of workers asked: vLLM's spin for a second after each call."""
    with flying(engine, tmp_path) as sidecar:
        began, calls = time.monotonic(), worker_calls(engine)
        used = {pid: cpu_seconds(pid) for pid in worker_pids(engine)}
        seen = []
        while time.monotonic() - began < IDLE_SECONDS:
            seen.append(sidecar.call("GET", "/memory"))
            time.sleep(0.25)
        assert {(report["engine"]["state"], report["ranks_reported"]) for report in seen} == {("ready", 2)}
        assert {report["progress"]["verdict"] for report in seen} == {"idle"}
        assert statistics.median(report["age_seconds"] for report in seen) < 3.0
        calls = worker_calls(engine) - calls
        seconds = time.monotonic() - began
        shares = [(cpu_seconds(pid) - before) / seconds for pid, before in used.items()]
        assert calls == 0
        assert max(shares) < 0.5
        assert incidents(sidecar) == []


@pytest.fixture
def folder_without_room(tmp_path: Path) -> Iterator[Path]:
    """A file system smaller than one recorder's file."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@on_two_workers
def test_a_folder_without_room_is_told_and_costs_the_recorders_only(
    engine: DemoEngine, tmp_path: Path, folder_without_room: Path
) -> None:
    """Both ranks are asked, as where no folder is shared."""
    for ring in (engine.folder / "recorders").glob("*.ring"):  # or they would go on
        ask_all(engine, "recorder_stop", json.dumps({"instance": ring.name.split("-")[1]}))
    with sidecar_beside(engine, tmp_path, HIGHWATER_RECORDER_DIR=str(folder_without_room)) as sidecar:
        report = wait_for(sidecar, lambda report: report["ranks_reported"] == 2 and report["engine"]["hint"])
        assert re.search(r"rank 0 did not start .*No space left on device", report["engine"]["hint"])
        assert [(rank["source"], rank["used_bytes"] > 0) for rank in report["ranks"]] == [("rpc", True)] * 2
        assert not any(folder_without_room.rglob("*.ring"))
        assert probes(sidecar) == WELL


# --- hangs, and what is none ---


@asynccontextmanager
async def a_request_under_way(engine: DemoEngine, sidecar: DemoSidecar) -> AsyncIterator[None]:
    body = {"model": engine.served_model, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}

    async def read(response: httpx.Response) -> None:
        async for _ in response.aiter_bytes():
            pass

    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{sidecar.url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == httpx.codes.OK
        reading = asyncio.create_task(read(response))
        try:
            await asyncio.to_thread(wait_for, sidecar, lambda report: report["engine"]["requests_running"] == 1)
            yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def is_said_to_be_stuck(report: dict[str, Any]) -> bool:
    """A call of ours that passed its deadline makes it unresponsive too, seconds before the recorders are sure."""
    return is_unresponsive(report) and report["progress"]["verdict"] == "stuck"


def is_said_to_be_stopped(report: dict[str, Any]) -> bool:
    return is_unresponsive(report) and "stopped by a signal" in report["engine"]["hint"]


@on_two_workers
def test_a_stopped_worker_is_a_hang_until_it_goes_on(engine: DemoEngine, tmp_path: Path) -> None:
    see_a_stopped_worker_hang(engine, tmp_path)


@on_two_workers
async def test_a_stopped_loop_is_a_hang_until_it_goes_on(engine: DemoEngine, tmp_path: Path) -> None:
    with flying(engine, tmp_path) as sidecar:
        async with a_request_under_way(engine, sidecar):
            with stopped(core_of(worker_pids(engine)[0])):
                report = await asyncio.to_thread(wait_for, sidecar, is_said_to_be_stuck, PATIENCE_SECONDS)
                assert report["ranks_reported"] == 2
                assert "schedules no work" in report["engine"]["hint"]
                report = await asyncio.to_thread(wait_for, sidecar, is_said_to_be_stopped, PATIENCE_SECONDS)
                assert f"run kill -CONT {core_of(worker_pids(engine)[0])}" in report["engine"]["hint"]
                assert (probes(sidecar), status(f"{engine.url}/health")) == (NOT_WELL, 200)
            await asyncio.to_thread(wait_for, sidecar, is_ready, PATIENCE_SECONDS)
        incident = await asyncio.to_thread(wait_for_incident, sidecar, lambda one: one["ended_at"] is not None)
        assert (incident["kind"], len(incident["ranks"])) == ("hung", 2)


@on_two_workers
async def test_a_long_step_is_no_hang(engine: DemoEngine, tmp_path: Path) -> None:
    body = {"model": engine.served_model, "prompt": [1] * (MOST_TOKENS - 200), "max_tokens": 1}
    with flying(engine, tmp_path, HIGHWATER_RPC_DEADLINE_SECONDS="1") as sidecar:
        async with httpx.AsyncClient(base_url=sidecar.url, trust_env=False, timeout=600) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            seen = []
            while not asked.done():
                seen.append(await asyncio.to_thread(sidecar.call, "GET", "/memory"))
                await asyncio.sleep(0.1)
        assert (await asked).status_code == httpx.codes.OK
        assert {report["engine"]["state"] for report in seen} <= {"ready", "busy"}
        busy = [report["progress"] for report in seen if report["progress"]["verdict"] == "busy"]
        assert max(progress["since_seconds"] for progress in busy) > 2.0
        assert "in one step" in busy[-1]["summary"]
        assert incidents(sidecar) == []


# --- a death; the last test, as it ends the engine ---


@on_two_workers
def test_a_killed_worker_leaves_an_incident_with_its_last_minutes(engine: DemoEngine, tmp_path: Path) -> None:
    folder = tmp_path / "incidents"
    folder.mkdir()
    with flying(engine, tmp_path, HIGHWATER_INCIDENTS__FOLDER=str(folder)) as sidecar:
        pids = [rank["pid"] for rank in sidecar.call("GET", "/memory")["ranks"]]
        time.sleep(2.0)
        os.kill(pids[1], signal.SIGKILL)
        wait_for(sidecar, lambda report: report["engine"]["state"] == "gone")
        incident = wait_for_incident(sidecar, lambda incident: incident["kind"] == "died")
        assert [(rank["rank"], rank["pid"]) for rank in incident["ranks"]] == [*enumerate(pids)]
        for rank in incident["ranks"]:
            assert rank["reading"]["used_bytes"] > 0
            assert len(rank["series"]) > 1
            assert rank["series"][-1]["used_bytes"] > 0
        assert incident["ranks"][1]["status"] == "dead"
        assert "worker_died" in {message["name"] for message in incident["messages"]}
        assert (folder / f"{incident['id']}.json").is_file()
        assert probes(sidecar) == NOT_WELL
