"""Frozen values that the rules judge: an incident's evidence, the incident as stored, and one measured load.

Bytes are integers, times are Unix seconds, of a load by the sidecar's clock; a figure that is not known is ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from gated_proxy.door_items import RequestItems
from highwater.diagnose.finding import Finding
from highwater.diagnose.log.messages import LogMessage
from highwater.diagnose.log.starts import FailedStart
from highwater.diagnose.log.story import QuotedException
from highwater.host.past import HostFacts
from highwater.host.reading import ProcessMemory
from highwater.host.report import OomKills
from highwater.model.components import COMPONENT_NAMES, MemoryPoint
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.growth import Growth
from highwater.model.policy import PolicyStatus
from highwater.model.rank import Device, EncoderCache, Ranked, RankKey, RankReading
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event, MemoryAtEnd
from highwater.model.units import difference

SCHEMA: Final = 1
IncidentKind: TypeAlias = Literal["died", "hung", "out_of_memory", "start_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderEntry:
    """One entry of a rank's encoder cache."""

    mm_hash: str
    bytes: int | None
    residency: str | None = None  # `device` or `host`, where that is known
    age_seconds: float | None = None  # since it was first seen: a lower bound
    embeds: int | None = None  # the number of its embeddings, the unit of the cache's capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence(Ranked):
    rank: int | None
    dp_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    status: str = "unknown"  # by its recorder: `alive`, `silent`, `stopped`, `dead` or `ended`; else `unknown`
    reading: RankReading | None = None
    doing: str = ""
    step_seconds: float | None = None  # how long its step had lasted; `None` outside of a step
    stack: tuple[str, ...] = ()  # the main thread's frames, innermost first
    series: tuple[MemoryPoint, ...] = ()  # its last minutes, oldest first
    entries: tuple[EncoderEntry, ...] = ()  # the largest entries of its encoder cache, largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class HangBefore:
    """The hang that an engine's death has ended: how long it and its incident lasted, and what was concluded of it."""

    seconds: float
    open_seconds: float
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known when an incident is opened."""

    kind: IncidentKind
    at: float
    engine: EngineStatus  # the engine at that moment, with the last figures that it reported of its requests
    ranks: tuple[RankEvidence, ...] = ()
    ranks_expected: int | None = None  # how many ranks the engine has, whether they were read or not
    baseline: tuple[RankReading, ...] = ()  # the first readings after this engine became ready
    growth: Growth = field(default_factory=Growth)
    policy: PolicyStatus | None = None
    policy_before: PolicyStatus | None = None  # the policy's last status while the engine's memory was known
    events: tuple[Event, ...] = ()
    reason: str = ""  # what was seen, in a few words: `connection refused`
    still_seconds: float = 0.0  # how long an engine that hangs had not moved then
    instance: str | None = None  # the name of its recorders' files; `are_closed`: every worker has closed its own
    are_closed: bool = False
    start: FailedStart | None = None
    # Processes of the engine beside its workers that were stopped then, of those that this machine shows.
    stopped: tuple[ProcessMemory, ...] = ()
    host: HostFacts | None = None  # host memory as read after it happened; `None` where it is not watched
    # Processes that the kernel killed for memory shortly before; `None` where no counter was read since.
    oom_kills: OomKills | None = None
    ended_by_signal: int | None = None  # the signal that ended a process of the engine, where the log says so
    hang: HangBefore | None = None
    # With images or videos, that ran or had just ended; those with the most decoded bytes first.
    requests: tuple[RequestItems, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """An incident in a list; these fields stand on the first line of its file."""

    schema: int | None = SCHEMA
    id: str  # sorts by time
    kind: IncidentKind | None
    at: float | None
    last_at: float | None = None  # when it was reported last
    count: int = 1
    ended_at: float | None = None  # when the engine was ready again; `None` until then
    summary: str = ""
    memory: MemoryAtEnd = "unknown"  # whether memory was short when it happened, as far as is known
    number: int = 1  # 1 for the first of its kind in this folder, and so on; the oldest may have been removed since
    problem: str | None = None  # why it cannot be read, in one sentence; `None` where it can

    @property
    def first_kind(self) -> str:
        """The kind that it began with; its id is a time, that kind and, of several in one second, a number."""
        return self.id.partition("-")[2].rstrip("-0123456789").replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Headline):
    """One incident, whole: of its evidence, and what was concluded from it."""

    engine: EngineStatus
    reason: str = ""
    still_seconds: float = 0.0  # how long an engine that hangs had not moved when that was seen
    start: str | None = None  # the last failed start of those that are counted here
    findings: tuple[Finding, ...] = ()
    messages: tuple[LogMessage, ...] = ()  # the log's known messages, causes before consequences
    exception: QuotedException | None = None  # the last exception of a worker or of EngineCore in the log, known or not
    ranks: tuple[RankEvidence, ...] = ()  # the evidence, thinned
    growth: Growth = field(default_factory=Growth)
    events: tuple[Event, ...] = ()
    policy: PolicyStatus | None = None
    decisions: tuple[Event, ...] = ()
    requests: tuple[RequestItems, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be known or kept, and why
    written_by: str = ""

    @property
    def headline(self) -> Headline:
        return Headline(**{part.name: getattr(self, part.name) for part in fields(Headline)})


# --- a measured load ---


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
    """Return the sum; ``None`` if any size is unknown, or there are no sizes."""
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
