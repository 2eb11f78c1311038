"""How long an overrun lasts: from crossing the high water to the end of the first remedy, at the default poll.

Only the sidecar may call the workers, so nobody sees the crossing itself. Two things are certain: it comes after the
last reading under the high water, and after the sending of the image that could have reached it at the earliest. What
is reported counts from the later of the two: an upper bound.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.demo.engine import Engine
from app.demo.errors import DemoError
from app.demo.sidecar import DemoSidecar
from app.demo.traffic import IMAGE_SIDE, send_images
from bench.figure import Figure, Goal, number
from bench.sidecar import MIB, sidecar_beside
from bench.stage import Stage
from tests.engines import image_cache_bytes

HIGH_BYTES = 64 * MIB
LOW_BYTES = 48 * MIB
CONCURRENCY = 2
DEADLINE_SECONDS = 60.0
LOOK_SECONDS = 0.1
WARM_UP_IMAGES = 16
RESET = {"remedies": ["reset_encoder_cache"]}
RULE = {
    "name": "bench",
    "signal": "encoder_cache_bytes",
    "high_water": HIGH_BYTES,
    "low_water": LOW_BYTES,
    "cooldown_seconds": 1,
    "min_gain_bytes": MIB,
    "remedies": RESET["remedies"],
}


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Seconds from each moment to the end of the remedy."""

    since_crossing: float
    since_over: float
    remedy: float


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """One figure of several crossings."""
    crossings = asyncio.run(_cross(stage, 4 if short else 12))
    bounds = [crossing.since_crossing for crossing in crossings]
    over = statistics.median(crossing.since_over for crossing in crossings)
    remedy = statistics.median(crossing.remedy for crossing in crossings)
    return [
        Figure(
            what="From crossing the high water to the end of the first remedy, upper bound, the longest",
            value=max(bounds),
            unit="s",
            goal=Goal("under", 2.0),
            spread=f"median {number(statistics.median(bounds))}, shortest {number(min(bounds))}; medians of "
            f"its parts: from the first reading over the high water {number(over)}, the remedy itself {number(remedy)}",
            method=f"real engine, default poll (1 s), a rule on `encoder_cache_bytes` at {HIGH_BYTES // MIB} MiB by "
            f"`PUT /policy`, image requests through the sidecar all the while, {len(crossings)} crossings after a "
            "warm-up; to the event of the finished reset, from the later of two moments before the crossing: the last "
            "reading under the high water, and the sending of the image with which the cache could first reach it.",
        )
    ]


async def _cross(stage: Stage, count: int) -> list[_Crossing]:
    engine = stage.engine
    with sidecar_beside(engine.url, stage.folder) as sidecar:
        seeds = itertools.count(random.getrandbits(40))  # images that no cache has seen
        # An engine's first images take seconds of warming up, which no crossing should be charged with.
        await send_images(sidecar.url, engine.served_model, images=itertools.islice(seeds, WARM_UP_IMAGES))
        sidecar.call("POST", "/memory/reclaim", RESET)
        sidecar.call("PUT", "/policy", {"mode": "act", "rules": [RULE]})
        return [await _one_crossing(engine, sidecar, seeds) for _ in range(count)]


async def _one_crossing(engine: Engine, sidecar: DemoSidecar, seeds: Iterator[int]) -> _Crossing:
    await _until_quiet(sidecar)
    # The polls keep to a grid; the crossings must not.
    await asyncio.sleep(random.random())  # noqa: S311 - no secret
    held = await _held_now(sidecar)
    needed = math.ceil((HIGH_BYTES - held) / image_cache_bytes(IMAGE_SIDE, IMAGE_SIDE))
    last_id = _events(sidecar)[0]["id"]
    over = asyncio.Event()
    sent_at: list[float] = []

    def images() -> Iterator[int]:
        while not over.is_set():
            sent_at.append(time.time())
            yield next(seeds)

    sending = send_images(sidecar.url, engine.served_model, images=images(), concurrency=CONCURRENCY)
    traffic = asyncio.create_task(sending)
    try:
        reset = await _first_reset(sidecar, last_id)
    finally:
        over.set()
        result = await traffic
    if result.failed:
        raise DemoError(f"{result.failed} of {result.sent} image requests failed: {result.errors}")
    return await asyncio.to_thread(_look_back, sidecar, reset, sent_at[needed - 1])


async def _held_now(sidecar: DemoSidecar) -> int:
    """What the encoder cache holds, asked anew: a mark takes a reading."""
    await asyncio.to_thread(sidecar.call, "POST", "/memory/marks", {"name": "bench"})
    held: int = (await asyncio.to_thread(sidecar.call, "GET", "/memory"))["encoder_cache"]["device_bytes"]
    return held


async def _until_quiet(sidecar: DemoSidecar) -> None:
    """Return when the rule is armed again and the cache is under the low water."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            report = await asyncio.to_thread(sidecar.call, "GET", "/memory")
            held = report["encoder_cache"]["device_bytes"]
            if report["policy"]["level"] == "calm" and held < LOW_BYTES:
                return
            if report["policy"]["level"] == "calm" or held >= HIGH_BYTES:
                # Requests that were under way when the remedy ended filled it up again.
                await asyncio.to_thread(sidecar.call, "POST", "/memory/reclaim", RESET)
            await asyncio.sleep(LOOK_SECONDS)


async def _first_reset(sidecar: DemoSidecar, last_id: int) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            for event in reversed(await asyncio.to_thread(_events, sidecar)):
                if event["id"] > last_id and event["kind"] == "reset" and event["trigger"] == "policy":
                    return event
            await asyncio.sleep(LOOK_SECONDS)


def _look_back(sidecar: DemoSidecar, reset: dict[str, Any], sent_at: float) -> _Crossing:
    # Readings after the remedy began are its own.
    decided = reset["at"] - reset["result"]["seconds"]
    readings = sidecar.call("GET", f"/memory/history?since={decided - DEADLINE_SECONDS}")["readings"]
    held = [(one["at"], one["ranks"][0]["encoder_cache_bytes"]) for one in readings if one["at"] < decided]
    under = max(at for at, size in held if size < HIGH_BYTES)
    over = min(at for at, _ in held if at > under)
    assert reset["result"]["outcome"] == "done", reset
    return _Crossing(reset["at"] - max(under, sent_at), reset["at"] - over, reset["result"]["seconds"])


def _events(sidecar: DemoSidecar) -> list[dict[str, Any]]:
    """Newest first."""
    events: list[dict[str, Any]] = sidecar.call("GET", "/memory/events?limit=50")["events"]
    return events
