"""One measured load, as frozen values. Sizes are bytes, times are Unix seconds of the sidecar's clock.

A figure that is not known is ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from highwater.diagnose.incident import EncoderEntry
from highwater.model.components import COMPONENT_NAMES
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.policy import PolicyStatus
from highwater.model.rank import Device, EncoderCache, RankKey, RankReading
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event
from highwater.model.units import difference

_Item = TypeVar("_Item")
_Size = TypeVar("_Size", int, float)


def part_of(reading: RankReading, name: str) -> int | None:
    held: int | None = getattr(reading.components if name in COMPONENT_NAMES else reading, name)
    return held


def risen(first: RankReading | None, now: RankReading, read: Callable[[RankReading], int | None]) -> int | None:
    return difference(read(now), None if first is None else read(first))


def change(first: RankReading | None, now: RankReading | None, part: str) -> int | None:
    """``None`` of another process too."""
    if first is None or now is None or first.pid != now.pid:
        return None
    return risen(first, now, lambda reading: part_of(reading, part))


def total(sizes: Iterable[int | None]) -> int | None:
    """``None`` where one is not known, or there is none."""
    listed = list(sizes)
    known = [each for each in listed if each is not None]
    return sum(known) if listed and len(known) == len(listed) else None


def highest(items: Iterable[_Item], read: Callable[[_Item], _Size | None]) -> tuple[_Size, _Item] | None:
    known = [(size, item) for item in items if (size := read(item)) is not None]
    return max(known, key=lambda each: each[0], default=None)


READY, BEFORE, PEAK, AFTER = "ready", "before", "peak", "after"


class Gap(NamedTuple):
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All ranks at one time; at the peak each rank at its own, and ``at`` is ``None``.

    ``name`` is ``ready``, ``before``, ``peak``, ``after``, or ``after`` and a remedy.
    """

    name: str
    title: str
    at: float | None
    ranks: tuple[RankReading, ...]

    def rank(self, key: RankKey) -> RankReading | None:
        return next((reading for reading in self.ranks if reading.key == key), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """The command, secrets masked, and how it ended; ``seconds`` are by this process's own clock.

    ``exit_code`` is as a shell reports it: 128 and the number for a signal.
    """

    command: tuple[str, ...]
    started_at: float
    ended_at: float
    seconds: float
    exit_code: int
    signal_name: str | None = None
    interrupted: bool = False

    def lasted(self, at: float) -> bool:
        return self.started_at <= at <= self.ended_at

    @property
    def exit_text(self) -> str:
        return f"exit code {self.exit_code}" + (f" ({self.signal_name})" if self.signal_name else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReading:
    """The encoder cache at one moment: of the rank that holds most, as every tensor-parallel rank holds a full copy."""

    title: str
    totals: EncoderCache
    largest: tuple[EncoderEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One measured load, whole; everything in order of time."""

    name: str
    load: LoadRun
    sidecar_url: str
    engine: EngineStatus  # as the sidecar saw it before the load; likewise `policy`
    device: Device
    moments: tuple[Moment, ...]
    series: Mapping[RankKey, tuple[RankReading, ...]] = field(default_factory=dict)
    traffic: tuple[tuple[float, EngineLoad], ...] = ()  # the engine's counts of its requests, and their times
    remedies: tuple[RemedyResult, ...] = ()
    not_tried: tuple[str, ...] = ()  # the remedies that Ctrl-C left out
    caches: tuple[CacheReading, ...] = ()  # empty where the model has no encoder cache
    events: tuple[Event, ...] = ()
    policy: PolicyStatus | None = None
    # The engine's settings that affect memory, by their flags.
    settings: Mapping[str, str] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()  # times under the load without a reading, the longest first
    recorded: bool = False  # whether the workers' recorders were read, ten samples a second
    notes: tuple[str, ...] = ()
    version: str = ""

    def moment(self, name: str) -> Moment | None:
        return next((moment for moment in self.moments if moment.name == name), None)

    def ranks(self, name: str) -> tuple[RankReading, ...]:
        return next((moment.ranks for moment in self.moments if moment.name == name), ())

    @property
    def after_remedies(self) -> tuple[Moment, ...]:
        return tuple(moment for moment in self.moments if moment.name.startswith(f"{AFTER} "))

    def change(self, earlier: str, later: str, part: str, keys: Container[RankKey] | None = None) -> int | None:
        """Return how a part moved between two moments, of these ranks or all; ``None``: one unknown, or restarted."""
        start, end = self.moment(earlier), self.moment(later)
        if start is None or end is None:
            return None
        ranks = dict.fromkeys(reading.key for reading in (*start.ranks, *end.ranks))
        return total(change(start.rank(key), end.rank(key), part) for key in ranks if keys is None or key in keys)

    def happened(self, kind: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.kind == kind and self.load.lasted(event.at))


def same_process(ranks: Sequence[RankReading], now: RankReading) -> RankReading | None:
    return next((each for each in ranks if each.key == now.key and each.pid == now.pid), None)


def host_used(reading: RankReading) -> int | None:
    return reading.host_memory.share[0]


def has_restarted(start: Moment, end: Moment) -> bool:
    pids = {reading.key: reading.pid for reading in start.ranks}
    return any(pids.get(reading.key, reading.pid) != reading.pid for reading in end.ranks)
