"""The rules' input: each rank's last, first and highest reading, and what is known beside them.

A case is built from an incident's evidence or from a measured load. A figure that is not known is ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from highwater.accounting.components import COMPONENT_NAMES
from highwater.diagnose.evidence import EncoderEntry, Evidence
from highwater.diagnose.log.story import NO_LOG, LogStory
from highwater.readings.engine import EngineLoad, EngineStatus
from highwater.readings.growth import SeriesGrowth
from highwater.readings.rank import RankReading
from highwater.readings.report import Report
from highwater.units import MIB, span_text

_Item = TypeVar("_Item")
_Size = TypeVar("_Size", int, float)

# Of each rank: less than both, in bytes and of its device, moves by itself.
NOTABLE_BYTES, NOTABLE_RATIO = 64 * MIB, 0.005
# From this age on a reading's age is named.
OLD_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCase:
    """One rank.

    Attributes:
        now: The last reading.
        first: The first reading of this process that counts: once the engine was ready, or before the load.
        peak: The highest reading; ``now`` where that is not known apart.
        entries: The largest known entries of its encoder cache.
        failed_allocation_bytes: The piece for which its allocator found no place, where the engine's log says so;
            ``now`` is then as it stood at that moment.
    """

    now: RankReading
    first: RankReading | None = None
    peak: RankReading
    entries: tuple[EncoderEntry, ...] = ()
    failed_allocation_bytes: int | None = None

    @property
    def name(self) -> str:
        return self.now.name

    @property
    def device_type(self) -> str | None:
        return self.now.device.type

    @property
    def alloc_retries(self) -> int | None:
        return risen(self.first, self.now, lambda reading: reading.torch.alloc_retries)

    @property
    def ooms(self) -> int | None:
        return risen(self.first, self.now, lambda reading: reading.torch.ooms)

    @property
    def free_ratio(self) -> float | None:
        free, whole = self.now.free_bytes, self.now.total_bytes
        return free / whole if free is not None and whole else None

    @property
    def notable_bytes(self) -> int:
        return max(NOTABLE_BYTES, int(NOTABLE_RATIO * (self.now.total_bytes or 0)))

    @property
    def unused_bytes(self) -> int | None:
        torch = self.now.torch
        if torch.reserved_bytes is None or torch.allocated_bytes is None:
            return None
        return max(torch.reserved_bytes - torch.allocated_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All ranks.

    Attributes:
        kind: The incident's kind; ``load`` for a measured load, ``running`` for an engine that runs, ``ahead`` for one
            to which nothing has happened yet.
        load: The figures of the engine's requests, whichever of both has them.
        grown_bytes: The growth of used bytes, over all ranks.
        grown: The same by component, where its beginning is known.
        since: The time that this growth took, as a part of a sentence.
        bytes_per_second: The pace at the end.
        seconds_to_full: When the first device is full at that pace.
        evidence: What was known when an incident opened; ``None`` of a measured load.
        log: What the engine's log says; of a measured load it is not read.
    """

    kind: str
    ranks: tuple[RankCase, ...] = ()
    at: float = 0.0
    engine: EngineStatus
    load: EngineLoad | EngineStatus = field(default_factory=EngineLoad)
    grown_bytes: int | None = None
    grown: Mapping[str, int] = field(default_factory=dict)
    since: str = ""
    bytes_per_second: float | None = None
    seconds_to_full: float | None = None
    series: tuple[SeriesGrowth, ...] = ()
    evidence: Evidence | None = None
    log: LogStory = NO_LOG

    @property
    def is_load(self) -> bool:
        return self.kind == "load"

    @property
    def device_type(self) -> str | None:
        return next((rank.device_type for rank in self.ranks if rank.device_type), None)

    @property
    def notable_bytes(self) -> int:
        return max(sum(rank.notable_bytes for rank in self.ranks), NOTABLE_BYTES)

    @property
    def has_grown(self) -> bool:
        return self.grown_bytes is not None and self.grown_bytes > self.notable_bytes

    @property
    def is_pool_given(self) -> bool:
        return self.log.gives_pool or any(rank.now.launch.kv_cache_given for rank in self.ranks)

    def age_seconds(self, rank: RankCase) -> float:
        return max(self.at - rank.now.taken_at, 0.0)

    def age_text(self, rank: RankCase) -> str:
        seconds = self.age_seconds(rank)
        return f", {span_text(seconds)} before" if seconds >= OLD_SECONDS else ""


def running(report: Report, baseline: Iterable[RankReading]) -> Case:
    first = {reading.key: reading for reading in baseline}
    known = () if report.stale else report.ranks
    grown = {
        name: moved
        for name in COMPONENT_NAMES
        if (moved := total(change(first.get(rank.key), rank, name) for rank in known)) is not None
    }
    ranks = tuple(RankCase(now=rank, first=first.get(rank.key), peak=rank) for rank in known)
    return Case(kind="running", ranks=ranks, engine=report.engine, load=report.engine, grown=grown)


def ahead(report: Report) -> Case:
    """Return an engine as a case to which nothing has happened yet, by what it was started with."""
    ranks = tuple(RankCase(now=rank, peak=rank) for rank in report.ranks)
    return Case(kind="ahead", ranks=ranks, engine=report.engine, load=report.engine)


def total(sizes: Iterable[int | None]) -> int | None:
    listed = list(sizes)
    known = [each for each in listed if each is not None]
    return sum(known) if listed and len(known) == len(listed) else None


def change(first: RankReading | None, now: RankReading | None, part: str) -> int | None:
    if first is None or now is None or first.pid != now.pid:
        return None
    return risen(first, now, lambda reading: part_of(reading, part))


def risen(first: RankReading | None, now: RankReading, read: Callable[[RankReading], int | None]) -> int | None:
    was, is_now = None if first is None else read(first), read(now)
    return None if was is None or is_now is None else is_now - was


def part_of(reading: RankReading, name: str) -> int | None:
    held: int | None = getattr(reading.components if name in COMPONENT_NAMES else reading, name)
    return held


def highest(items: Iterable[_Item], read: Callable[[_Item], _Size | None]) -> tuple[_Size, _Item] | None:
    known = [(size, item) for item in items if (size := read(item)) is not None]
    return max(known, key=lambda each: each[0], default=None)
