"""The engine is killed in the middle of each worker operation and started again.

Nothing stays held, and nothing of the life before is believed: not its processes, caches, growth or host memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import send_images
from tests.engines import send_texts, worker_pids

from .conftest import Victim, sidecar_beside, wait_for

IMAGES = 24
PATIENCE = 300.0
ROUNDS = int(os.environ.get("TEST_KILL_ROUNDS", "1"))
"""How often each operation is killed, each time at another moment of it."""
NOT_OFFERED = 501
pytestmark = pytest.mark.timeout(3600, func_only=True)


class Call(NamedTuple):
    """A call to the sidecar that becomes an operation in the workers.

    Attributes:
        name: What people call it.
        op: The operation, or the worker's method, in which the worker stops.
        path: Of the sidecar.
        body: JSON.
        after: A call that prepares it.
    """

    name: str
    op: str
    path: str
    body: dict[str, Any] | None = None
    after: Call | None = None


TRIM = Call("trim", "trim", "/memory/reclaim", {"remedies": ["trim_encoder_cache"]})
RESET = Call("reset", "reset_encoder_cache", "/reset_encoder_cache?mode=safe")
CALLS = (
    TRIM,
    Call("restore", "restore", "/memory/encoder-cache/restore", after=TRIM),
    Call("release", "release", "/memory/reclaim", {"remedies": ["release"]}),
    RESET,
    Call("snapshot", "snapshot", "/memory/snapshot", {"dry_run": True}),
)
# Before 0.16 a reset is the engine core's alone, and its process is the worker's.
OLD_RESET = RESET._replace(op="", path="/reset_prefix_cache?mode=safe")


@pytest.fixture(scope="module")
def victim(ruined: Victim) -> Victim:
    """It is killed again and again, and started on the same port."""
    return ruined


@pytest.fixture(scope="module")
def sidecar(victim: Victim, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoSidecar]:
    """One sidecar through all lives of the engine, with recorders, that acts only when told to."""
    folder = tmp_path_factory.mktemp("kills")
    settings = {
        "HIGHWATER_POLICY__MODE": "observe",
        "HIGHWATER_ENGINE_HAS_EXTENSION": "true",
        "HIGHWATER_RECORDER_DIR": str(folder / "recorders"),
        "HIGHWATER_STATE_FILE": str(folder / "state.json"),
    }
    with sidecar_beside(victim.engine, folder, **settings) as started:
        yield started


@pytest.mark.parametrize("round_number", range(ROUNDS))
@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=call.name, marks=() if call is TRIM else pytest.mark.soak) for call in CALLS],
)
async def test_an_engine_killed_in_an_operation(
    victim: Victim, sidecar: DemoSidecar, call: Call, round_number: int, record: Callable[..., None]
) -> None:
    version = victim.engine.environment.version
    if call is RESET and version == "0.12.0":
        call = OLD_RESET
    figures = await kill_in(victim, sidecar, call)
    figures |= await prove_a_fresh_life(victim.engine, sidecar)
    way = "engine killed in it" if not round_number else f"engine killed in it, {round_number + 1}"
    record(version, call.name, way, "no request held, no old figure", figures)


async def kill_in(victim: Victim, sidecar: DemoSidecar, call: Call) -> dict[str, float | str]:
    engine = victim.engine
    await fill(engine, sidecar)
    if call.op:
        for prepared in (call.after, call, call.after):  # once undisturbed: the worker learns how long it is
            if prepared is not None:
                await ask(sidecar, prepared)
        await fill(engine, sidecar)
        if call.after is not None:
            await ask(sidecar, call.after)
    fraction = round(random.uniform(0.05, 0.95), 2)  # noqa: S311 - nothing secret
    if call.op:
        victim.order.write_text(f"{call.op} {fraction}")
    asking = asyncio.create_task(ask(sidecar, call))
    if call.op:
        await until_one_stops(engine, asking)
    else:
        await asyncio.sleep(fraction / 2)
    # A client's request beside it, which the engine cannot answer either.
    beside = asyncio.create_task(send_texts(sidecar.url, engine.served_model, texts=["beside"], max_tokens=64))
    await asyncio.sleep(0.2)
    for pid in engine.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    response = await asking
    if call.op:
        assert response.status_code > NOT_OFFERED or failed(response.json()), response.text
        assert (await beside).failed == 1
    else:
        await beside
    return {"killed at": f"{fraction:.0%} of its calls", "status": response.status_code}


async def until_one_stops(engine: DemoEngine, asking: asyncio.Task[httpx.Response]) -> None:
    deadline = time.monotonic() + PATIENCE
    while psutil.STATUS_STOPPED not in {psutil.Process(pid).status() for pid in worker_pids(engine)}:
        assert not asking.done(), asking.result().text
        assert time.monotonic() < deadline, "no worker has stopped in the operation"
        await asyncio.sleep(0.02)


def failed(answer: dict[str, Any]) -> bool:
    return {result.get("outcome") for result in answer.get("results", [answer])} == {"failed"}


async def prove_a_fresh_life(engine: DemoEngine, sidecar: DemoSidecar) -> dict[str, float | str]:
    """Start it again, and hold what the sidecar says to what can be true of the new life only."""
    former = {rank["pid"] for rank in sidecar.call("GET", "/memory")["ranks"]}
    await asyncio.to_thread(engine.stop)  # what its keeper still holds
    began = time.monotonic()
    await asyncio.to_thread(engine.start)
    started = time.monotonic() - began
    workers = set(worker_pids(engine))
    assert not workers & former

    def is_fresh(now: dict[str, Any]) -> bool:
        return now["engine"]["state"] == "ready" and {rank["pid"] for rank in now["ranks"]} == workers

    began = time.monotonic()
    now = await asyncio.to_thread(wait_for, sidecar, is_fresh, PATIENCE)
    seen = time.monotonic() - began
    assert now["stale"] is False
    assert now["ranks_reported"] == now["ranks_expected"] == len(workers)
    for rank in now["ranks"]:
        cache = rank["encoder_cache"]
        assert (cache["entries"], cache["spills"], cache["restores"], cache["host_bytes"]) == (0, 0, 0, 0), cache
        rss = psutil.Process(rank["pid"]).memory_info().rss
        assert rank["host_memory"]["rss_bytes"] == pytest.approx(rss, rel=0.2)
    growth = now["growth"]["since_ready_bytes"]
    assert growth is None or abs(growth) < now["ranks"][0]["used_bytes"] / 4
    assert "highwater_proxy_requests_held 0.0" in await asyncio.to_thread(metrics, sidecar)
    answered = await send_images(sidecar.url, engine.served_model, images=[1, 2, 3])
    assert answered.errors == ()
    return {"start, s": round(started, 1), "seen after, s": round(seen, 1), "requests held": 0}


def metrics(sidecar: DemoSidecar) -> str:
    return httpx.get(f"{sidecar.url}/metrics", trust_env=False, timeout=PATIENCE).text


async def fill(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    """Give the caches something that an operation can move."""
    result = await send_images(sidecar.url, engine.served_model, images=range(IMAGES), concurrency=4)
    assert result.errors == ()


async def ask(sidecar: DemoSidecar, call: Call) -> httpx.Response:
    headers = sidecar.authorization()
    async with httpx.AsyncClient(base_url=sidecar.url, headers=headers, timeout=PATIENCE, trust_env=False) as client:
        return await client.post(call.path, json=call.body)
