"""One measured load, as frozen values: what was read when, what was run, what it gave back.

Nothing here asks, decides or formats. Sizes are bytes, times are Unix seconds of the sidecar's clock; what is not known
is ``None``, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from highwater.accounting.attribution import COMPONENTS, host_share, rank_key
from highwater.findings.case import Case, EncoderEntry, RankCase, change, part_of, total
from highwater.readings import (
    Device,
    EncoderCache,
    EngineLoad,
    EngineStatus,
    Event,
    PolicyStatus,
    RankReading,
    RemedyResult,
)

RankKey = tuple[int, int]

READY, BEFORE, PEAK, AFTER = "ready", "before", "peak", "after"


class Gap(NamedTuple):
    """A time without a reading."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return how long it was."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All ranks at one moment; at the peak each rank at its own.

    Attributes:
        name: ``ready``, ``before``, ``peak``, ``after``, or ``after`` and a remedy.
        title: As a table's head shows it.
        at: When; ``None`` where the ranks' moments differ.
    """

    name: str
    title: str
    at: float | None
    ranks: tuple[RankReading, ...]

    def rank(self, key: RankKey) -> RankReading | None:
        """Return that rank, where it was there."""
        return next((reading for reading in self.ranks if rank_key(reading) == key), None)

    def total(self, part: str) -> int | None:
        """Summed over the ranks; ``None`` where one of them is not known."""
        return total(part_of(reading, part) for reading in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """The command, and how it ended.

    Attributes:
        command: Its words, secrets masked.
        started_at: When it started; likewise ``ended_at``.
        seconds: How long it ran, on our own clock.
        exit_code: As a shell reports it: 128 and the number for a signal.
        signal_name: The signal that ended it, if one did.
        interrupted: Whether somebody stopped it while it ran.
    """

    command: tuple[str, ...]
    started_at: float
    ended_at: float
    seconds: float
    exit_code: int
    signal_name: str | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReading:
    """The encoder cache at one moment: of the rank that holds most, as every tensor-parallel rank holds a full copy.

    Attributes:
        title: Of the moment.
        totals: What it held.
        largest: The largest entries, largest first.
    """

    title: str
    totals: EncoderCache
    largest: tuple[EncoderEntry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One measured load, whole.

    Attributes:
        name: The operator's.
        load: The command.
        engine: As the sidecar saw it before the load.
        device: Of the first rank.
        moments: In order of time.
        series: Every rank's readings, oldest first.
        traffic: When and what the engine counted of its requests, oldest first.
        remedies: What came of each, in order.
        not_tried: The remedies that Ctrl-C left out.
        caches: The encoder cache, in order of time; none where the model has no such cache.
        events: What happened from the load's start to the end, oldest first.
        policy: As it stood before the load.
        settings: The engine's settings that matter for memory, by their flags.
        gaps: Times under the load without a reading, the longest first.
        recorded: Whether the workers' recorders were read, ten samples a second.
        notes: What could not be known, and why.
        version: Of Highwater.
    """

    name: str
    load: LoadRun
    sidecar_url: str
    engine: EngineStatus
    device: Device
    moments: tuple[Moment, ...]
    series: Mapping[RankKey, tuple[RankReading, ...]] = field(default_factory=dict)
    traffic: tuple[tuple[float, EngineLoad], ...] = ()
    remedies: tuple[RemedyResult, ...] = ()
    not_tried: tuple[str, ...] = ()
    caches: tuple[CacheReading, ...] = ()
    events: tuple[Event, ...] = ()
    policy: PolicyStatus | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    recorded: bool = False
    notes: tuple[str, ...] = ()
    version: str = ""

    def moment(self, name: str) -> Moment | None:
        """The moment of that name, where it was seen."""
        return next((moment for moment in self.moments if moment.name == name), None)

    def ranks(self, name: str) -> tuple[RankReading, ...]:
        """The ranks at the moment of that name; none where it was not seen."""
        moment = self.moment(name)
        return moment.ranks if moment is not None else ()

    @property
    def last(self) -> Moment | None:
        """The last moment that was read."""
        return self.moments[-1] if self.moments else None

    def change(self, earlier: str, later: str, part: str) -> int | None:
        """Return how a part moved between two moments, over the ranks; ``None`` where one is not known."""
        start, end = self.moment(earlier), self.moment(later)
        return None if start is None or end is None else total(moved for _, moved in changes(start, end, part))

    @cached_property
    def case(self) -> Case:
        """The ranks as they stood after the load, with what they grew by and their peaks: the rule book's input."""
        peaks = {rank_key(each): each for each in self.ranks(PEAK)}
        entries = next((cache.largest for cache in self.caches if cache.title == "after the load"), ())
        ranks = tuple(
            RankCase(
                now=now,
                first=same_process(self.ranks(BEFORE), now),
                peak=peaks.get(rank_key(now), now),
                entries=entries,
            )
            for now in self.ranks(AFTER)
        )
        return Case(
            kind="load",
            ranks=ranks,
            at=self.load.ended_at,
            engine=self.engine,
            load=self.traffic[-1][1] if self.traffic else EngineLoad(),
            grown_bytes=self.change(BEFORE, AFTER, "used_bytes"),
            grown={name: part for name in COMPONENTS if (part := self.change(BEFORE, AFTER, name)) is not None},
            since="under the load",
        )

    def happened(self, kind: str) -> tuple[Event, ...]:
        """The events of that kind from the load's start to its end."""
        return tuple(
            event
            for event in self.events
            if event.kind == kind and self.load.started_at <= event.at <= self.load.ended_at
        )


def changes(start: Moment, end: Moment, part: str) -> Iterator[tuple[RankKey, int | None]]:
    """Yield how a part moved on each rank of either moment; ``None`` where not known, or of another process."""
    for key in dict.fromkeys(rank_key(reading) for moment in (start, end) for reading in moment.ranks):
        yield key, change(start.rank(key), end.rank(key), part)


def same_process(ranks: Sequence[RankReading], now: RankReading) -> RankReading | None:
    """Return the same rank's reading among others, of the same process."""
    return next((each for each in ranks if rank_key(each) == rank_key(now) and each.pid == now.pid), None)


def host_used(reading: RankReading) -> int | None:
    """Return host memory in use where the rank runs: of its control group, or of the machine."""
    return host_share(reading)[0]


def has_restarted(start: Moment, end: Moment) -> bool:
    """Return whether a rank is another process at the end than at the start."""
    pids = {rank_key(reading): reading.pid for reading in start.ranks}
    return any(pids.get(rank_key(reading), reading.pid) != reading.pid for reading in end.ranks)
