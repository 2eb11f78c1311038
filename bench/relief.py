"""The cost of relief to traffic: one real engine, a sidecar, sixteen clients with images.

Times to the first token are compared within pairs: a slice of time in which nothing is done, and the slice after it, in
which one remedy is asked for every second. One pair of each round has two slices of nothing: how much those differ is
how much the machine's own noise is worth.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.figure import Figure, number, percentile
from bench.image_clients import CLIENTS, POOL, image_clients
from bench.rounds import order
from bench.sidecar import MIB, sidecar_beside
from bench.stage import Stage
from highwater.terminal.demo.process import DemoError
from highwater.terminal.demo.sidecar import DemoSidecar

REMEDIES = ("trim_encoder_cache", "release", "reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache")
WITH_RELEASE = frozenset({"trim_encoder_cache", "reset_encoder_cache"})
HOLDING = ("reset_mm_cache", "reset_prefix_cache")
"""Remedies for which requests are held at the gate."""
NOTHING = "nothing"
CALL_SECONDS = 120.0
SETTLE_SECONDS = 1.0
EVERY_SECONDS = 1.0
WARM_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds to the first token of the requests of two slices of time.

    Attributes:
        without: While nothing was done.
        beside: While the remedy was asked for.
    """

    without: Sequence[float]
    beside: Sequence[float]


@dataclass(slots=True)
class ReliefFindings:
    """Everything that was measured.

    Attributes:
        slice_seconds: How long a slice was.
        pairs: By remedy, one for each round.
        results: By remedy, what came of it under traffic.
        requests: Answered meanwhile; one that failed would have ended the run.
    """

    slice_seconds: float
    pairs: dict[str, list[Pair]] = field(default_factory=lambda: {name: [] for name in (*REMEDIES, NOTHING)})
    results: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in REMEDIES})
    requests: int = 0


@dataclass(frozen=True, slots=True)
class _Lengths:
    rounds: int
    slice_seconds: float
    holds: int


SHORT = _Lengths(rounds=3, slice_seconds=3.0, holds=10)
FULL = _Lengths(rounds=5, slice_seconds=5.0, holds=30)


@dataclass(frozen=True, slots=True)
class _Slice:
    began: float
    ended: float


def measure(stage: Stage, *, short: bool) -> list[Figure]:
    """The figures of docs/relief.md."""
    lengths = SHORT if short else FULL
    with sidecar_beside(stage.engine.url, stage.folder, policy__mode="observe") as sidecar:
        findings = asyncio.run(_Relief(stage, sidecar, lengths).measured())
    return relief_figures(findings)


class _Relief:
    """The measurements, one after the other on the same engine."""

    def __init__(self, stage: Stage, sidecar: DemoSidecar, lengths: _Lengths) -> None:
        self._url = sidecar.url
        self._headers = sidecar.authorization()
        self._model = stage.engine.served_model
        self._lengths = lengths
        self._found = ReliefFindings(slice_seconds=lengths.slice_seconds)

    async def measured(self) -> ReliefFindings:
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as self._session:
            await self._disturb_traffic()
        return self._found

    async def _disturb_traffic(self) -> None:
        names = (*REMEDIES, NOTHING)
        spans: list[tuple[str, _Slice, _Slice]] = []
        async with image_clients(self._url, self._model) as traffic:
            await asyncio.sleep(WARM_SECONDS)
            for turn in range(self._lengths.rounds):
                spans += [(name, await self._slice(NOTHING), await self._slice(name)) for name in order(names, turn)]
                print(f"  round {turn + 1}: {len(traffic.first_bytes)} answers so far", flush=True)
            for name in HOLDING:
                while len(self._found.results[name]) < self._lengths.holds:
                    await self._act(name)
                    await asyncio.sleep(EVERY_SECONDS)
        # All are answered only now.
        for name, without, beside in spans:
            pair = Pair(traffic.waits(without.began, without.ended), traffic.waits(beside.began, beside.ended))
            self._found.pairs[name].append(pair)
        self._found.requests = len(traffic.first_bytes)

    async def _slice(self, name: str) -> _Slice:
        """So much time, and in it one remedy every second, or as fast as it goes."""
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        ended = began + self._lengths.slice_seconds
        while name != NOTHING and (acted := time.monotonic()) < ended:
            await self._act(name)
            await asyncio.sleep(max(min(acted + EVERY_SECONDS, ended) - time.monotonic(), 0))
        await asyncio.sleep(max(ended - time.monotonic(), 0))
        return _Slice(began, ended)

    async def _act(self, name: str) -> None:
        self._found.results[name].append(await self._reclaim(name))

    async def _reclaim(self, remedy: str) -> dict[str, Any]:
        async with self._session.post(f"{self._url}/memory/reclaim", json={"remedies": [remedy]}) as response:
            answer: dict[str, Any] = await response.json()
        if "results" not in answer:
            raise DemoError(f"{remedy} was not run: {answer}")
        result: dict[str, Any] = answer["results"][0]
        return result


def relief_figures(found: ReliefFindings) -> list[Figure]:
    """All of them."""
    return [
        *(_added(name, found) for name in (NOTHING, *REMEDIES)),
        *(_hold(name, found) for name in HOLDING),
        *_standstills(found),
    ]


def _added(name: str, found: ReliefFindings) -> Figure:
    pairs = found.pairs[name]
    added = {
        percent: [1000 * (percentile(pair.beside, percent) - percentile(pair.without, percent)) for pair in pairs]
        for percent in (50, 99)
    }
    times = "" if name == NOTHING else f"; {len(found.results[name])} times"
    return Figure(
        what=f"Added time to first token (p50), {_beside(name)}",
        value=statistics.median(added[50]),
        unit="ms",
        goal=None,
        spread=f"rounds {_range(added[50])}; at p99 {number(statistics.median(added[99]))}, rounds "
        f"{_range(added[99])}{times}",
        method=f"real engine, {CLIENTS} clients through the sidecar; every other request repeats one of {POOL} images; "
        f"{len(pairs)} rounds of paired slices of {found.slice_seconds:g} s without and with the remedy; medians of "
        f"the differences. {found.requests} requests, none failed.",
    )


def _beside(name: str) -> str:
    if name == NOTHING:
        return "nothing done (the noise)"
    moment = " (safe)" if name in HOLDING else " and `release`" if name in WITH_RELEASE else ""
    return f"`{name}`{moment} every second"


def _hold(name: str, found: ReliefFindings) -> Figure:
    results = found.results[name]
    done = [result for result in results if result["outcome"] == "done" and result["held_seconds"]]
    held = [result["held_seconds"] for result in done]
    return Figure(
        what=f"Safe `{name}`: how long new requests are held, {CLIENTS} clients",
        value=statistics.median(held),
        unit="s",
        goal=None,
        spread=f"shortest {number(min(held))}, longest {number(max(held))}; {len(done)} of {len(results)} done so",
        method="after `reset_mm_cache` fewer requests are in the engine at a time, and the first token comes sooner",
    )


def _standstills(found: ReliefFindings) -> list[Figure]:
    trims = [detail for result in found.results["trim_encoder_cache"] for detail in result["detail"]]
    releases = [detail for result in found.results["release"] for detail in result["detail"]]
    moved = [detail["spilled_bytes"] / MIB for detail in trims]
    method = "standstill: of the workers"
    return [
        _standstill(
            "trim",
            trims,
            f"{number(statistics.median(moved))} MiB moved, at most {number(max(moved))}",
            method,
        ),
        _standstill("release", releases, "garbage collection, and `malloc_trim`", method),
    ]


def _standstill(op: str, details: Sequence[dict[str, Any]], more: str, method: str) -> Figure:
    times = [detail["elapsed_ms"] for detail in details]
    return Figure(
        what=f"Engine's standstill for op `{op}`, median",
        value=statistics.median(times),
        unit="ms",
        goal=None,
        spread=f"longest {number(max(times))} of {len(times)}; {more}",
        method=method,
    )


def _range(values: Sequence[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"
