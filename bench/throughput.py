"""The cost of polling to the engine: tokens a second with and without it.

The requests go straight to the engine, so that the proxy is not in it. Every round has two slices without a sidecar:
how much those two differ is how much the machine's own noise is worth.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import aiohttp

from bench.figure import Figure, Goal, number
from bench.rounds import order
from bench.sidecar import sidecar_beside
from bench.stage import Stage

SETTLE_SECONDS = 2.0
CONCURRENCY = 8
REQUESTS = 48
MAX_TOKENS = 200
PROMPT = "The tide came in over the flats, and the marks on the pole went under one by one."
NONE, AGAIN = "none", "none again"
# Polls a second to the time between them.
PACES: Mapping[str, str] = {"1/s": "1", "5/s": "0.2"}


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second, round by round.

    Attributes:
        ratios: Of each slice to the mean of the round's two slices with nothing to measure.
        control: Of the second of those two to the first.
        noise: Twice the standard error of a median, by how all ratios scatter.
        plain: Tokens a second with nothing to measure, the median.
    """

    ratios: Mapping[str, Sequence[float]]
    control: Sequence[float]
    noise: float
    plain: float


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """A ratio for each pace of polling."""
    rates = rates_of(stage, {name: partial(_polling, stage, poll) for name, poll in PACES.items()}, short=short)
    return [_figure(name, rates) for name in PACES]


def rates_of(stage: Stage, what: Mapping[str, Callable[[], AbstractContextManager[None]]], *, short: bool) -> Rates:
    """Measure several things, each in slices between two without any of them.

    Args:
        stage: The engine's.
        what: What is entered for a slice, by its name.
        short: Fewer rounds.
    """
    rounds = 3 if short else 8
    asyncio.run(_generate(stage, REQUESTS // 2))  # warm
    slices = {NONE: nullcontext, **what, AGAIN: nullcontext}
    rates = [_round(stage, slices, turn=turn) for turn in range(rounds)]
    control = [rate[AGAIN] / rate[NONE] for rate in rates]
    ratios = {name: [rate[name] / statistics.mean((rate[NONE], rate[AGAIN])) for rate in rates] for name in what}
    return Rates(
        ratios=ratios,
        control=control,
        noise=2 * _standard_error([control, *ratios.values()]),
        plain=statistics.median(value for rate in rates for value in (rate[NONE], rate[AGAIN])),
    )


def _standard_error(series: Sequence[Sequence[float]]) -> float:
    """Return that of one series' median, by how all of them scatter; 1.25 is a median's for normal noise."""
    strays = [value - statistics.median(one) for one in series for value in one]
    return 1.25 * statistics.stdev(strays) / math.sqrt(len(series[0]))


def _round(
    stage: Stage, slices: Mapping[str, Callable[[], AbstractContextManager[object]]], *, turn: int
) -> dict[str, float]:
    """Tokens a second of each slice; every round begins with another slice, every other one runs backwards."""
    rates = {}
    for name in order(list(slices), turn):
        with slices[name]():
            time.sleep(SETTLE_SECONDS)
            rates[name] = asyncio.run(_generate(stage, REQUESTS))
    print("  tokens/s:", ", ".join(f"{name} {rates[name]:.0f}" for name in slices), flush=True)
    return rates


@contextmanager
def _polling(stage: Stage, poll_seconds: str) -> Iterator[None]:
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


def _figure(name: str, rates: Rates) -> Figure:
    return ratio_figure(
        f"Engine's tokens/s with a poll at {name}, over that without",
        name,
        rates,
        Goal("at least", 0.98),
    )


def ratio_figure(what: str, name: str, rates: Rates, goal: Goal | None) -> Figure:
    """One of the ratios as a figure.

    Args:
        what: What was measured.
        name: Of its slices.
        rates: All of them.
        goal: For the ratio.
    """
    ratios, control = rates.ratios[name], rates.control
    return Figure(
        what=what,
        value=statistics.median(ratios),
        unit="",
        goal=goal,
        spread=f"rounds {number(min(ratios))} to {number(max(ratios))}; the same with nothing to measure, twice: "
        f"{number(min(control))} to {number(max(control))}; noise {number(rates.noise)}; {rates.plain:.0f} tokens/s "
        "without",
        method=f"real engine, {REQUESTS} requests of {MAX_TOKENS} tokens straight to it, {CONCURRENCY} at a time; "
        f"{len(ratios)} rounds of slices without, with and again without",
        noise=rates.noise,
    )
