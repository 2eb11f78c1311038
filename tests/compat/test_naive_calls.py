"""The controls: what relief does to a busy engine where nobody takes care. Each gets an engine of its own to ruin.

Sixteen clients ask the engine for 24 images over and over, and the naive call is made again and again meanwhile,
until the engine answers no more.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from highwater.process.worker_package import SHIM_FOLDER
from highwater.terminal.demo.engine import DemoEngine, link_extension
from highwater.terminal.demo.traffic import image_url, send_images
from tests.engines import send_texts

from .clients import POOL, Clients
from .conftest import HANGING_VERSIONS, HERE

OK = 200
CALLS = 1000
HERD = 16
HERD_ROUNDS = 150
HTTP_ERROR = 500
CALL_SECONDS = 180.0
SILENCE_SECONDS = 20.0
"""How long nothing may come from an engine that is to be called silent: its slowest request takes a second."""


@dataclass(frozen=True)
class Ruin:
    """How it went with the engine.

    Attributes:
        outcome: `engine hangs`, `engine dies`, or `engine lives`.
        figures: In numbers.
        log: What the engine wrote.
    """

    outcome: str
    figures: dict[str, float | str]
    log: str


async def test_resetting_the_multimodal_cache_hangs_the_engine(
    version: str, engine_factory: Callable[..., DemoEngine], record: Callable[..., None]
) -> None:
    """The two halves of the cache, in two processes, are emptied one after the other, with requests in between.

    0.12: a request counts on an item that the second half has lost, and the thread that takes in all requests dies of
    it (v1/engine/core.py, process_input_sockets). 0.23 survives that, but `touch` leaves a key without an item behind
    (utils/cache.py:122), and the next reset turns forever on that key in `LRUCache.clear` (utils/cache.py:208).
    From 0.25.1 on the engine survives; requests may fail.
    """
    with engine_factory() as engine:
        ruin = await ruined(engine, "/reset_mm_cache")
    record(version, "reset_mm_cache", "naive", ruin.outcome, ruin.figures)
    assert ruin.outcome == ("engine hangs" if version in HANGING_VERSIONS else "engine lives")
    assert ruin.figures["health"] == OK
    assert "Expected a cached item for mm_hash" in ruin.log or version != "0.12.0"


async def test_requests_let_loose_after_a_reset_at_idle(
    version: str, engine_factory: Callable[..., DemoEngine], record: Callable[..., None]
) -> None:
    """Afterwards all images are new, and of requests that bring the same one some overtake others in the front-end.

    0.12 hangs of it, so that no moment is quiet enough there; 0.23 fails such a request, if one comes.
    """
    rounds, failed, hung = 0, 0, False
    with engine_factory() as engine:
        while rounds < HERD_ROUNDS and not hung:
            hung = not await resets_while_idle(engine)
            if not hung:
                rounds += 1
                herd = await asyncio.gather(*(one_of_a_herd(engine, number) for number in range(HERD)))
                failed += sum(status == HTTP_ERROR for status in herd)
                hung = None in herd
    outcome = "engine hangs" if hung else "engine lives"
    record(version, "reset_mm_cache", "naive, idle, then 16 at once", outcome, {"resets": rounds, "HTTP 500": failed})
    assert hung == (version == "0.12.0")


async def resets_while_idle(engine: DemoEngine) -> bool:
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=SILENCE_SECONDS) as client:
        try:
            await client.post("/reset_mm_cache")
        except httpx.TimeoutException:
            return False
    return True


async def one_of_a_herd(engine: DemoEngine, number: int) -> int | None:
    """The status of a request with one of four images, and for some another that is their own; None for no answer."""
    seeds = (number % 4,) if number % 3 else (100 + number, number % 4)
    images = [{"type": "image_url", "image_url": {"url": image_url(one, width=256, height=256)}} for one in seeds]
    body = {
        "model": engine.served_model,
        "max_tokens": 2,
        "stream": number % 3 == 0,
        "messages": [{"role": "user", "content": [*images, {"type": "text", "text": "What is this?"}]}],
    }
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=SILENCE_SECONDS) as client:
        try:
            return (await client.post("/v1/chat/completions", json=body)).status_code
        except httpx.TimeoutException:
            return None


async def test_clearing_the_workers_encoder_cache_kills_the_engine(
    version: str, engine_factory: Callable[..., DemoEngine], record: Callable[..., None], tmp_path: Path
) -> None:
    folders = (SHIM_FOLDER, link_extension(tmp_path), HERE / "on_engine_path")
    options = {
        "extra_args": ("--worker-extension-cls", "naive_worker.NaiveWorker"),
        "extra_env": (("PYTHONPATH", os.pathsep.join(map(str, folders))),),
    }
    with engine_factory(**options) as engine:
        ruin = await ruined(engine, "/collective_rpc", {"method": "naive_clear_encoder_cache"})
    record(version, "clear_encoder_cache", "naive", ruin.outcome, ruin.figures)
    assert ruin.outcome == "engine dies"
    assert "Encoder cache miss for" in ruin.log


async def ruined(engine: DemoEngine, path: str, body: dict[str, Any] | None = None) -> Ruin:
    """Make the call beside live traffic until the engine answers no more, and stop the engine."""
    assert (await send_images(engine.url, engine.served_model, images=POOL)).errors == ()
    clients = await Clients(engine).start()
    began = time.monotonic()
    calls, last_seconds = 0, 0.0
    while calls < CALLS and last_seconds < CALL_SECONDS:
        calls, last_seconds = calls + 1, time.monotonic() - began
        if not await answered(engine, path, body):
            break
    figures: dict[str, float | str] = {"calls": calls, "last_call_seconds": round(last_seconds, 1)}
    outcome = await state_of(engine, clients)
    figures |= {"health": await health(engine)}
    if outcome == "engine hangs":
        figures |= {"engine_core_cpu_percent": await asyncio.to_thread(engine_core_cpu_percent, engine)}
    clients.send_no_more()
    await asyncio.to_thread(engine.stop)  # it lets those go that wait for a hung engine
    result = await clients.result()
    figures |= {"answered_requests": result.sent - result.failed}
    if outcome != "engine dies":  # there the clients fail as fast as they can ask
        figures |= {"failed_requests": result.failed}
    return Ruin(outcome, figures, engine.log_path.read_text(errors="replace"))


async def answered(engine: DemoEngine, path: str, body: dict[str, Any] | None) -> bool:
    """Say whether the engine answers the call in time, well or not; a new connection each, as errors close theirs."""
    async with httpx.AsyncClient(timeout=SILENCE_SECONDS, trust_env=False) as client:
        try:
            await client.post(engine.url + path, json=body)
        except (httpx.TimeoutException, httpx.ConnectError):
            return False
        except httpx.TransportError:  # the connection went away with an engine that is about to
            pass
    return await health(engine) == OK


async def state_of(engine: DemoEngine, clients: Clients) -> str:
    """A hung engine is one whose /health is good while no client gets an answer, nor does a text without images."""
    if await health(engine) != OK:
        return "engine dies"
    before = clients.ended
    try:
        await asyncio.wait_for(send_texts(engine.url, engine.served_model, texts=["Hello?"]), SILENCE_SECONDS)
    except TimeoutError:
        return "engine hangs" if clients.ended == before and await health(engine) == OK else "engine lives"
    return "engine lives"


async def health(engine: DemoEngine) -> int:
    """The status that /health answers with; 0 where nobody answers. It may be slow: a hung engine can take a core."""
    async with httpx.AsyncClient(timeout=SILENCE_SECONDS, trust_env=False) as client:
        try:
            return (await client.get(f"{engine.url}/health")).status_code
        except httpx.TransportError:
            return 0


def engine_core_cpu_percent(engine: DemoEngine) -> float:
    """What EngineCore uses of a CPU: none where its thread for input died, all where it turns in a loop."""
    for pid in engine.pids():
        try:
            process = psutil.Process(pid)
            if "EngineCore" in " ".join(process.cmdline()):
                percent: float = process.cpu_percent(interval=1.0)
                return percent
        except psutil.NoSuchProcess:  # a dying engine
            continue
    return 0.0
