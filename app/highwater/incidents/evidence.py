"""Evidence made safe to keep, and as a case for the rules: each rank's reading and series become one reading. Pure.

The series may reach further than the last full reading (a recorder writes more often than the poller reads), and the
reading has figures that a series does not keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Final, TypeVar

from highwater.accounting.attribution import COMPONENTS, account, rank_key
from highwater.accounting.points import MemoryPoint
from highwater.findings.case import Case, RankCase, change
from highwater.incidents.incident import Evidence, RankEvidence
from highwater.readings import Components, Device, EngineLoad, EngineStatus, RankReading, TorchMemory, WorkerMemory
from highwater.text.printable import cleaned

_Parts = TypeVar("_Parts", Components, TorchMemory)
MAX_STACK, MAX_ENTRIES = 16, 20
_LOAD: Final = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")


def case_of(evidence: Evidence) -> Case:
    """Return the last reading of every rank, with the growth until then."""
    ranks = tuple(
        RankCase(now=now, first=_baseline_of(evidence, rank), peak=now, entries=rank.entries)
        for rank in evidence.ranks
        for now in (latest(rank),)
    )
    since_ready = any(rank.first is not None for rank in ranks)
    grown = _growth(evidence, ranks, since_ready=since_ready)
    growth, engine = evidence.growth, engine_of(evidence)
    whole = growth.since_ready_bytes
    return Case(
        kind=evidence.kind,
        ranks=ranks,
        at=evidence.at,
        engine=evidence.engine,
        load=EngineLoad(**{name: getattr(engine, name) for name in _LOAD}),
        grown_bytes=whole if whole is not None else sum(grown.values()) if grown else None,
        grown=grown,
        since="since the engine was ready" if since_ready or whole is not None else "over the minutes that were kept",
        bytes_per_second=growth.bytes_per_second,
        seconds_to_full=growth.seconds_to_full,
        series=growth.series,
    )


def engine_of(evidence: Evidence) -> EngineStatus:
    """Return the engine at that moment, with the last figures that it reported of its requests."""
    known = {name: value for name in _LOAD if (value := getattr(evidence.load, name)) is not None}
    return replace(evidence.engine, **known)


def latest(evidence: RankEvidence) -> RankReading:
    """Return the rank's last reading, with what its series has since."""
    reading = evidence.reading
    if reading is None:
        nothing = WorkerMemory(
            rank=evidence.rank, dp_rank=evidence.dp_rank, pid=evidence.pid, taken_at=0.0, device=Device()
        )
        reading = account(nothing)
    if not evidence.series or evidence.series[-1].at <= reading.taken_at:
        return reading
    last = evidence.series[-1]
    free = reading.free_bytes
    if free is not None and reading.used_bytes is not None and last.used_bytes is not None:
        free = max(free - (last.used_bytes - reading.used_bytes), 0)
    return replace(
        reading,
        taken_at=last.at,
        used_bytes=last.used_bytes,
        free_bytes=free,
        components=_filled(last.components, reading.components),
        torch=_filled(last.torch, reading.torch),
    )


def known_points(evidence: RankEvidence) -> tuple[MemoryPoint, ...]:
    """Return the series and the reading, oldest first."""
    if evidence.reading is None:
        return evidence.series
    return tuple(sorted((*evidence.series, MemoryPoint.of(evidence.reading)), key=lambda known: known.at))


def joined(ranks: tuple[RankEvidence, ...], before: tuple[RankEvidence, ...]) -> tuple[RankEvidence, ...]:
    """Return each rank's evidence of now, with that of a moment before where it has more."""
    known = {(rank_key(rank), rank.pid): rank for rank in before}
    joined = []
    for rank in ranks:
        was = known.pop((rank_key(rank), rank.pid), rank)
        series = max(rank.series, was.series, key=len)
        joined.append(replace(rank, series=series, stack=rank.stack or was.stack, entries=rank.entries or was.entries))
    return (*joined, *known.values())


def harmless(evidence: Evidence) -> Evidence:
    """Return it with every text as one plain line and every list bounded. A series has no texts, and many points."""
    bare = replace(evidence, ranks=tuple(replace(rank, series=()) for rank in evidence.ranks))
    clean = cleaned(bare)
    ranks = tuple(
        replace(rank, series=was.series, stack=rank.stack[:MAX_STACK], entries=rank.entries[:MAX_ENTRIES])
        for rank, was in zip(clean.ranks, evidence.ranks, strict=True)
    )
    return replace(clean, ranks=ranks)


def _baseline_of(evidence: Evidence, rank: RankEvidence) -> RankReading | None:
    """Return the first reading of this rank's process after the engine was ready; not that of another process."""
    for first in evidence.baseline:
        if rank_key(first) == rank_key(rank) and (rank.pid is None or first.pid in (None, rank.pid)):
            return first
    return None


def _growth(evidence: Evidence, ranks: tuple[RankCase, ...], *, since_ready: bool) -> Mapping[str, int]:
    """Return by how much each component grew, summed over the ranks whose beginning is known."""
    grown: dict[str, int] = {}
    for known, rank in zip(evidence.ranks, ranks, strict=True):
        points = known_points(known)
        if not points or (since_ready and rank.first is None):
            continue
        begun = rank.first or replace(rank.now, components=points[0].components)
        for name in COMPONENTS:
            if (moved := change(replace(begun, pid=rank.now.pid), rank.now, name)) is not None:
                grown[name] = grown.get(name, 0) + moved
    return {name: grown[name] for name in COMPONENTS if name in grown}


def _filled(newer: _Parts, older: _Parts) -> _Parts:
    """Take from the older what the newer lacks: a series need not keep all that a reading has."""
    missing = {part.name: getattr(older, part.name) for part in fields(newer) if getattr(newer, part.name) is None}
    return replace(newer, **missing)
