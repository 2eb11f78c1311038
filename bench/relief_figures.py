"""The figures of docs/relief.md, from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.figure import Figure, number, percentile
from bench.image_clients import CLIENTS, IMAGE_SIDE, POOL
from bench.sidecar import MIB

GIB = 1024**3
REMEDIES = ("trim_encoder_cache", "release", "reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache")
WITH_RELEASE = frozenset({"trim_encoder_cache", "reset_encoder_cache"})
HOLDING = ("reset_mm_cache", "reset_prefix_cache")
"""Remedies for which requests are held at the gate."""
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds to the first token of the requests of two slices of time.

    Attributes:
        without: While nothing was done.
        beside: While the remedy was asked for.
    """

    without: Sequence[float]
    beside: Sequence[float]


@dataclass(frozen=True, slots=True)
class Move:
    """All entries to the host and back, on a quiet engine.

    Attributes:
        trimmed: Op `trim`'s answer.
        restored: Op `restore`'s answer.
        plain: What the plain copy reached just before.
    """

    trimmed: dict[str, Any]
    restored: dict[str, Any]
    plain: dict[str, Any]


@dataclass(slots=True)
class ReliefFindings:
    """Everything that was measured.

    Attributes:
        slice_seconds: How long a slice was.
        trims: What came of trims with a target on a quiet engine, one after the other.
        largest_group_bytes: The largest storage that entries shared before them.
        moves: Of everything, one after the other.
        pairs: By remedy, one for each round.
        results: By remedy, what came of it under traffic.
        requests: Answered meanwhile; one that failed would have ended the run.
    """

    slice_seconds: float
    trims: list[dict[str, Any]] = field(default_factory=list)
    largest_group_bytes: int = 0
    moves: list[Move] = field(default_factory=list)
    pairs: dict[str, list[Pair]] = field(default_factory=lambda: {name: [] for name in (*REMEDIES, NOTHING)})
    results: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in REMEDIES})
    requests: int = 0


def relief_figures(found: ReliefFindings) -> list[Figure]:
    """All of them."""
    return [
        _freed(found),
        *(_added(name, percent, found) for name in (NOTHING, *REMEDIES) for percent in (50, 99)),
        *(_hold(name, found) for name in HOLDING),
        *_standstills(found),
        *_rates(found),
    ]


def _freed(found: ReliefFindings) -> Figure:
    details = [trim["detail"][0] for trim in found.trims]
    ratios = [detail["spilled_bytes"] / detail["asked_bytes"] for detail in details]
    past = [(detail["spilled_bytes"] - detail["asked_bytes"]) / MIB for detail in details]
    shown = [
        trim["freed_bytes"]["components"]["encoder_cache_bytes"] / detail["spilled_bytes"]
        for trim, detail in zip(found.trims, details, strict=True)
    ]
    return Figure(
        what="`trim_encoder_cache` with `free_bytes`: bytes spilled over bytes asked",
        value=statistics.median(ratios),
        unit="",
        goal=None,
        spread=f"{_range(ratios)}; past the target by {_range(past)} MiB, where the largest storage that entries share "
        f"has {number(found.largest_group_bytes / MIB)} MiB; `encoder_cache_bytes` then shows {_range(shown)} of the "
        "spilled bytes as gone",
        method=f"encoder cache filled with images of {IMAGE_SIDE} x {IMAGE_SIDE}, {CLIENTS} at a time; then "
        f"{len(details)} trims of {details[0]['asked_bytes']} bytes, one after the other, with no traffic",
    )


def _added(name: str, percent: int, found: ReliefFindings) -> Figure:
    pairs = found.pairs[name]
    without = [percentile(pair.without, percent) * 1000 for pair in pairs]
    beside = [percentile(pair.beside, percent) * 1000 for pair in pairs]
    added = [with_it - alone for with_it, alone in zip(beside, without, strict=True)]
    ratios = [with_it / alone for with_it, alone in zip(beside, without, strict=True)]
    asked = "" if name == NOTHING else f"; {len(found.results[name])} times"
    return Figure(
        what=f"Added time to first token, p{percent}, {_beside(name)}",
        value=statistics.median(added),
        unit="ms",
        goal=None,
        spread=f"rounds {_range(added)}; {number(statistics.median(without))} without, ratio "
        f"{number(statistics.median(ratios))}, rounds {_range(ratios)}{asked}",
        method=f"real engine, {CLIENTS} clients through the sidecar without a rest, streamed answers; every other "
        f"request repeats one of {POOL} images, the others bring new ones; {len(pairs)} rounds, in each a slice of "
        f"{found.slice_seconds:g} s with nothing done and one right after it with this done every second (or as "
        "fast as it goes), in changing order; differences and ratios are within these pairs, the median counts. "
        f"About {_requests_a_slice(found)} requests a slice: a p99 is the slowest of them or nearly so. "
        f"{found.requests} requests in all, none failed.",
    )


def _beside(name: str) -> str:
    if name == NOTHING:
        return "nothing done (the noise)"
    moment = " (safe)" if name in HOLDING else " and `release`" if name in WITH_RELEASE else ""
    return f"`{name}`{moment} every second"


def _requests_a_slice(found: ReliefFindings) -> int:
    return round(statistics.median(len(pair.without) for pairs in found.pairs.values() for pair in pairs))


def _hold(name: str, found: ReliefFindings) -> Figure:
    results = found.results[name]
    done = [result for result in results if result["outcome"] == "done" and result["moment"] == "gate"]
    held = [result["held_seconds"] for result in done]
    return Figure(
        what=f"Safe `{name}`: how long new requests are held, {CLIENTS} clients",
        value=statistics.median(held),
        unit="s",
        goal=None,
        spread=f"shortest {number(min(held))}, longest {number(max(held))}; {len(done)} of {len(results)} done so",
        method=f"`held_seconds` of the answers to `POST /memory/reclaim`, {CLIENTS} clients as above. It ends with "
        "the remedy: after `reset_mm_cache` the held pass one by one, 20 ms apart, and that is not in it.",
    )


def _standstills(found: ReliefFindings) -> list[Figure]:
    trims = [detail for result in found.results["trim_encoder_cache"] for detail in result["detail"]]
    releases = [detail for result in found.results["release"] for detail in result["detail"]]
    moved = [detail["spilled_bytes"] / MIB for detail in trims]
    restored = [move.restored for move in found.moves]
    where = "`elapsed_ms` of the workers' answers; the engine makes no step meanwhile"
    return [
        _standstill(
            "trim",
            trims,
            f"{number(statistics.median(moved))} MiB moved, at most {number(max(moved))}",
            f"{where}; {CLIENTS} clients as above",
        ),
        _standstill(
            "release", releases, "garbage collection, and `malloc_trim`", f"{where}; {CLIENTS} clients as above"
        ),
        _standstill(
            "restore", restored, f"{number(restored[0]['restored_bytes'] / MIB)} MiB moved", f"{where}; no traffic"
        ),
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


def _rates(found: ReliefFindings) -> list[Figure]:
    spills = [move.trimmed["spilled_bytes"] / move.trimmed["copy_seconds"] / GIB for move in found.moves]
    restores = [move.restored["restored_bytes"] / move.restored["copy_seconds"] / GIB for move in found.moves]
    first = found.moves[0]
    method = (
        f"{len(spills)} times all {first.trimmed['spilled_entries']} entries to the host and back, with no traffic, "
        "bytes over `copy_seconds`; before each time `copy_` of as many tensors of that size in the engine's Python "
        f"({_threads(first.plain['threads'])}, as the engine's worker has, no engine in it), onto tensors that were "
        "there (the ratio is to that one, time by time, the median counts) and into new ones by `empty_like`. On CPU "
        "both ways are copies within the host's memory, and new memory costs more than the copy where the kernel has "
        "to make its pages."
    )
    return [_rate("Spill", spills, "to_host", found, method), _rate("Restore", restores, "to_device", found, method)]


def _rate(what: str, ours: Sequence[float], way: str, found: ReliefFindings, method: str) -> Figure:
    plain = [move.plain[way] for move in found.moves]
    ratios = [mine / copy for mine, copy in zip(ours, plain, strict=True)]
    new = statistics.median(move.plain["to_new"] for move in found.moves)
    return Figure(
        what=f"{what}, GiB/s over those of a plain copy",
        value=statistics.median(ratios),
        unit="",
        goal=None,
        spread=f"{_range(ratios)}; {number(statistics.median(ours))} GiB/s, {_range(ours)}; plain "
        f"{number(statistics.median(plain))}, {_range(plain)}, into new memory {number(new)}",
        method=method,
    )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _range(values: Sequence[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"
