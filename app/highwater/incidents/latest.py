"""An incident's evidence as a case for the rules: the reading and the series of each rank made one. Pure.

The series may reach further than the last full reading (a recorder writes more often than the poller asks), and the
reading knows what a series does not keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from highwater.accounting.attribution import COMPONENTS, account, rank_key
from highwater.accounting.points import MemoryPoint
from highwater.findings.case import Case, RankCase, change, total
from highwater.incidents.incident import Evidence, RankEvidence
from highwater.readings import Components, Device, EngineLoad, EngineStatus, RankReading, TorchMemory, WorkerMemory

_Parts = TypeVar("_Parts", Components, TorchMemory)
_Number = TypeVar("_Number", int | None, float | None)


def case_of(evidence: Evidence) -> Case:
    """Return all ranks of an incident as they stood last, with what they grew by."""
    firsts = [baseline_of(evidence, rank) for rank in evidence.ranks]
    ranks = tuple(_rank_case(rank, first) for rank, first in zip(evidence.ranks, firsts, strict=True))
    since_ready = any(first is not None for first in firsts)
    grown = _growth(evidence, ranks, since_ready=since_ready)
    whole = evidence.growth.since_ready_bytes
    return Case(
        kind=evidence.kind,
        ranks=ranks,
        at=evidence.at,
        engine=evidence.engine,
        load=load_of(evidence),
        grown_bytes=whole if whole is not None else sum(grown.values()) if grown else None,
        grown=grown,
        since="since the engine was ready" if since_ready or whole is not None else "over the minutes that were kept",
        bytes_per_second=evidence.growth.bytes_per_second,
        seconds_to_full=evidence.growth.seconds_to_full,
        series=evidence.growth.series,
    )


def load_of(evidence: Evidence) -> EngineLoad:
    """Return what the engine last reported of its requests."""
    load, engine = evidence.load, evidence.engine
    return EngineLoad(
        requests_running=_first(load.requests_running, engine.requests_running),
        requests_waiting=_first(load.requests_waiting, engine.requests_waiting),
        kv_cache_usage_ratio=_first(load.kv_cache_usage_ratio, engine.kv_cache_usage_ratio),
    )


def engine_of(evidence: Evidence) -> EngineStatus:
    """Return the engine at that moment, with what it last reported of its requests."""
    load = load_of(evidence)
    return replace(
        evidence.engine,
        requests_running=load.requests_running,
        requests_waiting=load.requests_waiting,
        kv_cache_usage_ratio=load.kv_cache_usage_ratio,
    )


def latest(evidence: RankEvidence) -> RankReading:
    """Return the rank as it stood last; what is not known is ``None``."""
    reading = evidence.reading
    if reading is None:
        nothing = WorkerMemory(
            rank=evidence.rank, dp_rank=evidence.dp_rank, pid=evidence.pid, taken_at=0.0, device=Device()
        )
        reading = account(nothing)
    if not evidence.series or evidence.series[-1].at <= reading.taken_at:
        return reading
    last = evidence.series[-1]
    return replace(
        reading,
        taken_at=last.at,
        used_bytes=last.used_bytes,
        free_bytes=_free(reading, last),
        components=_filled(last.components, reading.components),
        torch=_filled(last.torch, reading.torch),
    )


def known_points(evidence: RankEvidence) -> tuple[MemoryPoint, ...]:
    """Return the series and the reading, oldest first."""
    if evidence.reading is None:
        return evidence.series
    return tuple(sorted((*evidence.series, MemoryPoint.of(evidence.reading)), key=lambda known: known.at))


def baseline_of(evidence: Evidence, rank: RankEvidence) -> RankReading | None:
    """Return the first reading of this rank's process after the engine was ready; not that of another process."""
    key = rank_key(rank)
    for first in evidence.baseline:
        if rank_key(first) == key and (rank.pid is None or first.pid in (None, rank.pid)):
            return first
    return None


def _rank_case(rank: RankEvidence, first: RankReading | None) -> RankCase:
    now = latest(rank)
    return RankCase(now=now, first=first, peak=now, entries=rank.entries)


def _growth(evidence: Evidence, ranks: tuple[RankCase, ...], *, since_ready: bool) -> Mapping[str, int]:
    """Return by how much each component grew, summed over the ranks whose beginning is known."""
    grown: dict[str, list[int | None]] = {name: [] for name in COMPONENTS}
    for known, rank in zip(evidence.ranks, ranks, strict=True):
        points = known_points(known)
        if not points or (since_ready and rank.first is None):
            continue
        begun = rank.first or replace(rank.now, components=points[0].components)
        for name, moved in grown.items():
            moved.append(change(replace(begun, pid=rank.now.pid), rank.now, name))
    sizes = {name: [each for each in moved if each is not None] for name, moved in grown.items()}
    return {name: total(moved) or 0 for name, moved in sizes.items() if moved}


def _filled(newer: _Parts, older: _Parts) -> _Parts:
    """Take from the older what the newer one does not have: a series need not keep all that a reading has."""
    missing = {part.name: getattr(older, part.name) for part in fields(newer) if getattr(newer, part.name) is None}
    return replace(newer, **missing)


def _free(reading: RankReading, last: MemoryPoint) -> int | None:
    """Return what used bytes have grown by since the reading is free no more."""
    if reading.free_bytes is None or reading.used_bytes is None or last.used_bytes is None:
        return reading.free_bytes
    return max(reading.free_bytes - (last.used_bytes - reading.used_bytes), 0)


def _first(value: _Number, other: _Number) -> _Number:
    return other if value is None else value
