"""What polling costs the engine: tokens a second with and without it.

The requests go straight to the engine, so that the proxy is not in it. Every round has two slices without a sidecar:
how much those two differ is how much the machine's own noise is worth.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import aiohttp

from bench.figure import Figure, Goal, number
from bench.sidecar import sidecar_beside
from bench.stage import Stage

SETTLE_SECONDS = 2.0
CONCURRENCY = 8
REQUESTS = 48
MAX_TOKENS = 200
PROMPT = "The tide came in over the flats, and the marks on the pole went under one by one."
# Slice name to time between polls; None: no sidecar at all.
SLICES: Mapping[str, str | None] = {"none": None, "1/s": "1", "5/s": "0.2", "none again": None}


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """A ratio for each pace of polling."""
    rounds = 3 if short else 8
    asyncio.run(_generate(stage, REQUESTS // 2))  # warm
    rates = [_round(stage, turn=turn) for turn in range(rounds)]
    control = [rate["none again"] / rate["none"] for rate in rates]
    paces = [name for name, poll in SLICES.items() if poll is not None]
    ratios = {
        name: [rate[name] / statistics.mean((rate["none"], rate["none again"])) for rate in rates] for name in paces
    }
    plain = statistics.median(value for rate in rates for value in (rate["none"], rate["none again"]))
    noise = 2 * _standard_error([control, *ratios.values()])
    return [_figure(name, ratios[name], control, noise, plain) for name in paces]


def _standard_error(series: Sequence[Sequence[float]]) -> float:
    """Of the median of one series, by how all of them scatter round their own; 1.25 is a median's for normal noise."""
    strays = [value - statistics.median(one) for one in series for value in one]
    return 1.25 * statistics.stdev(strays) / math.sqrt(len(series[0]))


def _round(stage: Stage, *, turn: int) -> dict[str, float]:
    """Tokens a second of each slice; every round begins with another slice, every other one runs backwards."""
    names = list(SLICES)
    start = turn % len(names)
    order = [*names[start:], *names[:start]]
    rates = {}
    for name in reversed(order) if turn % 2 else order:
        with _polling(stage, SLICES[name]):
            time.sleep(SETTLE_SECONDS)
            rates[name] = asyncio.run(_generate(stage, REQUESTS))
    print("  tokens/s:", ", ".join(f"{name} {rates[name]:.0f}" for name in names), flush=True)
    return rates


@contextmanager
def _polling(stage: Stage, poll_seconds: str | None) -> Iterator[None]:
    if poll_seconds is None:
        yield
        return
    with sidecar_beside(stage.engine.url, stage.folder, poll_seconds=poll_seconds):
        yield


async def _generate(stage: Stage, requests: int) -> float:
    """Run a fixed amount of work; return the tokens a second."""
    body = {
        "model": stage.engine.served_model,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    bodies = iter([body] * requests)

    async def work(session: aiohttp.ClientSession) -> int:
        tokens = 0
        for one in bodies:
            async with session.post(f"{stage.engine.url}/v1/completions", json=one) as response:
                tokens += (await response.json())["usage"]["completion_tokens"]
        return tokens

    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
        began = time.monotonic()
        tokens = sum(await asyncio.gather(*(work(session) for _ in range(CONCURRENCY))))
        seconds = time.monotonic() - began
    assert tokens == requests * MAX_TOKENS, (tokens, requests)
    return tokens / seconds


def _figure(name: str, ratios: Sequence[float], control: Sequence[float], noise: float, plain: float) -> Figure:
    return Figure(
        what=f"Engine's tokens/s with a poll at {name}, over that without",
        value=statistics.median(ratios),
        unit="",
        goal=Goal("at least", 0.98),
        spread=f"rounds {number(min(ratios))} to {number(max(ratios))}; the same without a sidecar, twice: "
        f"{number(min(control))} to {number(max(control))}; noise {number(noise)}; {plain:.0f} tokens/s without",
        method=f"real engine, {REQUESTS} requests of {MAX_TOKENS} tokens straight to it, {CONCURRENCY} at a time; "
        f"{len(ratios)} rounds of four slices (none, 1/s, 5/s, none again) in changing order; each round's ratio is to "
        "the mean of its two slices without a sidecar, the median of the rounds counts. The engine, the client and "
        "the sidecar share the machine's cores. Noise is twice the "
        "standard error of a median, by how all ratios scatter: a goal nearer than that is not decided.",
        noise=noise,
    )
