"""What is killed or fails in the middle of a relief: the engine serves, no request stays held, and an event tells."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.engines import send_texts
from tests.patience import LIMIT_SECONDS

from .conftest import Victim, sidecar_beside, wait_for

PATIENCE = 300.0


@pytest.fixture
def victim(ruined: Victim) -> DemoEngine:
    """It is killed and started again; those who share it have a fresh one afterwards."""
    return ruined.engine


def settings(folder: Path, **more: str) -> dict[str, str]:
    """A sidecar that acts only when told to, and gives requests long to finish."""
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


def is_paused(engine: DemoEngine) -> bool:
    answer = httpx.get(f"{engine.url}/is_paused", timeout=PATIENCE, trust_env=False)
    return bool(answer.raise_for_status().json()["is_paused"])


def kill(process_ids: list[int]) -> None:
    for pid in process_ids:
        os.kill(pid, signal.SIGKILL)


def sidecar_process(sidecar: DemoSidecar, engine: DemoEngine) -> list[int]:
    """The sidecar itself, without what keeps it."""
    return [
        pid
        for pid in sidecar.pids()
        if (line := psutil.Process(pid).cmdline()) and "highwater" in line and engine.url in line
    ]


async def ask(sidecar: DemoSidecar, path: str) -> httpx.Response | httpx.HTTPError:
    """A reset that may end in any way."""
    headers = sidecar.authorization()
    async with httpx.AsyncClient(base_url=sidecar.url, headers=headers, timeout=120, trust_env=False) as client:
        try:
            return await client.post(path)
        except httpx.HTTPError as exc:
            return exc


async def is_served(url: str, engine: DemoEngine) -> None:
    result = await send_texts(url, engine.served_model, texts=["still there?"], max_tokens=2)
    assert result.errors == ()


@pytest.mark.parametrize("path", ["/reset_mm_cache?mode=safe", "/reset_prefix_cache?mode=safe"])
async def test_a_sidecar_killed_in_the_middle_of_a_gated_reset(victim: DemoEngine, tmp_path: Path, path: str) -> None:
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as sidecar:
        held = asyncio.create_task(ask_until_one_fails(sidecar, victim))
        reset = asyncio.create_task(reset_until_one_fails(sidecar, path))
        await until(lambda: f'outcome="done",remedy="{path[1:].partition("?")[0]}"' in metrics(sidecar))
        kill(sidecar_process(sidecar, victim))
        assert isinstance(await reset, httpx.HTTPError)
        await held
    await is_served(victim.url, victim)
    assert not is_paused(victim)
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as successor:
        await is_served(successor.url, victim)
        answer = await ask(successor, path)
        assert isinstance(answer, httpx.Response)
        assert (answer.status_code, answer.json()["outcome"], answer.json()["quiesced_by"]) == (200, "done", "gate")


async def reset_until_one_fails(sidecar: DemoSidecar, path: str) -> httpx.HTTPError:
    """As fast as they go: at nearly any time there is one."""
    while isinstance(answer := await ask(sidecar, path), httpx.Response):
        assert answer.json()["outcome"] == "done", answer.json()
    return answer


async def test_a_sidecar_killed_while_it_holds_requests_holds_none_afterwards(
    victim: DemoEngine, tmp_path: Path
) -> None:
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as sidecar:
        stream, reset, held = await reset_that_holds_a_request(sidecar, victim)
        kill(sidecar_process(sidecar, victim))
        assert isinstance(await reset, httpx.HTTPError)
        await held  # its connection is gone with the sidecar
        stream.close()
    assert not is_paused(victim)
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as successor:
        await is_served(successor.url, victim)


async def reset_that_holds_a_request(
    sidecar: DemoSidecar, engine: DemoEngine
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


async def ask_until_one_fails(sidecar: DemoSidecar, engine: DemoEngine) -> None:
    """Short requests, one after the other: the first few may pass before the gate closes."""
    while not (await send_texts(sidecar.url, engine.served_model, texts=["held"], max_tokens=1)).failed:
        pass


def metrics(sidecar: DemoSidecar) -> str:
    return httpx.get(f"{sidecar.url}/metrics", trust_env=False, timeout=LIMIT_SECONDS).text


async def test_an_engine_killed_during_a_reset(victim: DemoEngine, tmp_path: Path) -> None:
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


async def test_a_full_disk_costs_no_reset(victim: DemoEngine, tmp_path: Path) -> None:
    with sidecar_beside(victim, tmp_path, **settings(tmp_path)) as sidecar:
        (pid,) = sidecar_process(sidecar, victim)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        answer = await ask(sidecar, "/reset_prefix_cache?mode=safe")
        assert isinstance(answer, httpx.Response)
        assert (answer.json()["outcome"], answer.json()["quiesced_by"]) == ("done", "gate")
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
