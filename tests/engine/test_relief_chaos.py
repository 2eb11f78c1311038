"""What is killed or fails in the middle of a relief: no engine stays paused, no request held, and an event tells."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from app.demo.sidecar import DemoSidecar
from app.demo.traffic import send_texts

from .conftest import sidecar_beside, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.demo.engine import Engine

PATIENCE = 60.0
PAUSING = """
import asyncio, sys
from pathlib import Path
from app.engine import Engine
from app.history import History
from app.pause import Pause
from app.state_file import StateFile

async def main():
    async with Engine(sys.argv[1]) as engine:
        async with Pause(engine, StateFile(Path(sys.argv[2])), History(10)).paused(30.0):
            print("paused", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def victim(engine: Engine) -> Engine:
    """It is paused, killed and started again; those who share it have a fresh one afterwards."""
    return engine


def settings(folder: Path, **more: str) -> dict[str, str]:
    """A sidecar that acts only when told to, that may pause, and whose safe moments come late."""
    return {
        "HIGHWATER_POLICY__MODE": "observe",
        "HIGHWATER_STATE_FILE": str(folder / "state.json"),
        "HIGHWATER_GATE__DRAIN_SECONDS": "60",
        "HIGHWATER_GATE__HOLD_SECONDS": "90",
        **more,
    }


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def is_paused(engine: Engine) -> bool:
    answer = httpx.get(f"{engine.url}/is_paused", timeout=PATIENCE, trust_env=False)
    return bool(answer.raise_for_status().json()["is_paused"])


def kill(process_ids: list[int]) -> None:
    for pid in process_ids:
        os.kill(pid, signal.SIGKILL)


def guards(engine: Engine) -> list[int]:
    """The processes that would resume this engine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "app.resume_guard" in line and engine.url in line:
            found.append(process.pid)
    return found


def sidecar_process(sidecar: DemoSidecar, engine: Engine) -> list[int]:
    """The sidecar itself, without what keeps it and without guards."""
    return [
        pid
        for pid in sidecar.pids()
        if (line := psutil.Process(pid).cmdline()) and "app.cli" in line and engine.url in line
    ]


async def ask(sidecar: DemoSidecar, path: str) -> httpx.Response | httpx.HTTPError:
    """A reset that may end in any way."""
    headers = sidecar.authorization()
    async with httpx.AsyncClient(base_url=sidecar.url, headers=headers, timeout=120, trust_env=False) as client:
        try:
            return await client.post(path)
        except httpx.HTTPError as exc:
            return exc


async def is_served(url: str, engine: Engine) -> None:
    """A new request gets its answer."""
    result = await send_texts(url, engine.served_model, texts=["still there?"], max_tokens=2)
    assert result.errors == ()


@pytest.mark.parametrize("guard_dies_too", [False, True])
async def test_whoever_is_killed_in_a_pause_leaves_no_engine_paused(
    victim: Engine, tmp_path: Path, guard_dies_too: bool
) -> None:
    """The guard resumes; with the whole container gone, the next sidecar does, and says so."""
    state = tmp_path / "state.json"
    # The sidecar's own part that pauses, in a process that stays in the pause for as long as it lives.
    pausing = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PAUSING, victim.url, str(state)), stdout=asyncio.subprocess.PIPE
    )
    assert pausing.stdout is not None
    assert await asyncio.wait_for(pausing.stdout.readline(), PATIENCE) == b"paused\n"
    assert is_paused(victim)
    watching = guards(victim)
    assert len(watching) == 1
    kill((watching if guard_dies_too else []) + [pausing.pid])
    await pausing.wait()
    if guard_dies_too:
        assert is_paused(victim)
    else:
        await until(lambda: not is_paused(victim))
    assert "pause" in json.loads(state.read_text())
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as successor:
        await until(lambda: not is_paused(victim))
        await is_served(successor.url, victim)
        await until(lambda: "pause" not in json.loads(state.read_text()))
        (event,) = recoveries(successor)
        assert event["summary"] == "resumed the engine: an earlier sidecar ended while it held it paused"
    await until(lambda: guards(victim) == [])


def recoveries(sidecar: DemoSidecar) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = sidecar.call("GET", "/memory/events")["events"]
    return [event for event in events if event["kind"] == "recovery"]


async def test_a_sidecar_killed_while_it_holds_requests_holds_none_afterwards(victim: Engine, tmp_path: Path) -> None:
    """Nothing of the gate outlives it; the engine was never paused."""
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as sidecar:
        stream, reset, held = await reset_that_holds_a_request(sidecar, victim)
        kill(sidecar_process(sidecar, victim))
        assert isinstance(await reset, httpx.HTTPError)
        await held  # its connection is gone with the sidecar
        stream.close()
    assert not is_paused(victim)
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as successor:
        await is_served(successor.url, victim)
        assert recoveries(successor) == []


async def reset_that_holds_a_request(
    sidecar: DemoSidecar, engine: Engine
) -> tuple[asyncio.StreamWriter, asyncio.Task[httpx.Response | httpx.HTTPError], asyncio.Task[None]]:
    """A long answer under way, the reset that waits for it, and a request that is held."""
    _, stream = await asyncio.open_connection("127.0.0.1", sidecar.port)
    body = json.dumps(
        {"model": engine.served_model, "prompt": "on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    ).encode()
    stream.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: sidecar\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until(lambda: "highwater_proxy_requests_in_flight 1.0" in metrics(sidecar))
    reset = asyncio.create_task(ask(sidecar, "/reset_mm_cache?mode=safe"))
    held = asyncio.create_task(ask_until_one_fails(sidecar, engine))
    await until(lambda: "highwater_proxy_requests_held 1.0" in metrics(sidecar))
    return stream, reset, held


async def ask_until_one_fails(sidecar: DemoSidecar, engine: Engine) -> None:
    """Short requests, one after the other: the first few may pass before the gate closes."""
    while not (await send_texts(sidecar.url, engine.served_model, texts=["held"], max_tokens=1)).failed:
        pass


def metrics(sidecar: DemoSidecar) -> str:
    return httpx.get(f"{sidecar.url}/metrics", trust_env=False).text


async def test_an_engine_killed_during_a_reset(victim: Engine, tmp_path: Path) -> None:
    """The reset fails and says why, nobody is held any longer; the next engine serves at once."""
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as sidecar:
        stream, reset, held = await reset_that_holds_a_request(sidecar, victim)
        kill(victim.pids())
        stream.close()
        answer = await reset
        await held  # let go, to an engine that is not there any more
        assert isinstance(answer, httpx.Response)
        assert (answer.status_code, answer.json()["outcome"]) == (503, "failed")
        assert "highwater_proxy_requests_held 0.0" in metrics(sidecar)
        victim.stop()  # what its keeper still holds
        victim.start()
        wait_for(sidecar, lambda report: report["engine"]["state"] == "ready", PATIENCE)
        await is_served(sidecar.url, victim)
        assert not is_paused(victim)
        summaries = [event["summary"] for event in sidecar.call("GET", "/memory/events")["events"]]
        assert any(summary.startswith("reset_mm_cache failed") for summary in summaries)


async def test_a_full_disk_costs_the_pause_and_not_the_reset(victim: Engine, tmp_path: Path) -> None:
    """Nothing can be written down, so the engine is not paused; requests are held here instead."""
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as sidecar:
        (pid,) = sidecar_process(sidecar, victim)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        answer = await ask(sidecar, "/reset_prefix_cache?mode=safe")
        assert isinstance(answer, httpx.Response)
        assert (answer.json()["outcome"], answer.json()["moment"]) == ("done", "gate")
        put = await asyncio.to_thread(
            httpx.put,
            f"{sidecar.url}/policy",
            json={"mode": "act"},
            headers=sidecar.authorization(),
            trust_env=False,
            timeout=PATIENCE,
        )
        assert (put.status_code, put.json()["error"]["code"]) == (507, "not_kept")
        assert sidecar.call("GET", "/policy")["mode"] == "observe"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        answer = await ask(sidecar, "/reset_prefix_cache?mode=safe")
        assert isinstance(answer, httpx.Response)
        assert (answer.json()["outcome"], answer.json()["moment"]) == ("done", "pause")
    assert guards(victim) == []
