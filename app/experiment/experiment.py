"""What an experiment holds: frozen values, from which both forms of its report are made. Nothing here reads or formats.

Bytes are integers, times are Unix seconds of the sidecar's clock; absent knowledge is ``None``, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from app.attribution import rank_key
from app.readings import Budget, Components, Device, EncoderCache, EngineStatus, TorchMemory
from app.table import rank_title

RankKey: TypeAlias = tuple[int, int]
RemedyOutcome: TypeAlias = Literal["done", "refused", "failed", "interrupted"]

READY, BEFORE, PEAK, AFTER = "ready", "before", "peak", "after"
# What of a rank is told at each moment beside the components of its used bytes.
HOST_FIELDS: Final = ("host_rss_bytes", "host_used_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPoint:
    """One rank at one moment.

    Attributes:
        at: When it was read.
        host_rss_bytes: The worker's resident set size.
        host_used_bytes: In use where it lives: of the control group, or of the machine.
        encoder_cache: Totals; ``None`` where the source tells only the bytes, or the model has none.
    """

    rank: int | None
    dp_rank: int | None = None
    pid: int | None = None
    at: float
    used_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    components: Components = field(default_factory=Components)
    torch: TorchMemory = field(default_factory=TorchMemory)
    budget: Budget = field(default_factory=Budget)
    host_rss_bytes: int | None = None
    host_used_bytes: int | None = None
    encoder_cache: EncoderCache | None = None

    @property
    def key(self) -> RankKey:
        """What identifies the rank; data-parallel engines number theirs from 0 each."""
        return rank_key(self)

    @property
    def name(self) -> str:
        """The rank as an operator calls it."""
        return f"rank {rank_title(self.dp_rank, self.rank)}"

    def part(self, name: str) -> int | None:
        """Used bytes, a component of them, or what the host says, by its name."""
        holder = self if hasattr(self, name) else self.components
        size: int | None = getattr(holder, name)
        return size


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
    ranks: tuple[RankPoint, ...]

    def rank(self, key: RankKey) -> RankPoint | None:
        """That rank, where it was there."""
        return next((point for point in self.ranks if point.key == key), None)

    def total(self, part: str) -> int | None:
        """Summed over the ranks; ``None`` where one of them does not tell."""
        return _sum(point.part(part) for point in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """The command, and how it ended.

    Attributes:
        command: Its words, secrets masked.
        started_at: When it started; likewise ``ended_at``.
        seconds: How long it ran, on our own clock.
        exit_code: As a shell would tell it: 128 and the number for a signal.
        signal_name: The signal that ended it, if one did.
        interrupted: Whether we were told to stop while it ran.
    """

    command: tuple[str, ...]
    started_at: float
    ended_at: float
    seconds: float
    exit_code: int
    signal_name: str | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyStep:
    """One remedy, run or not, as the sidecar told it.

    Attributes:
        outcome: ``interrupted``: not asked for, or its answer not awaited.
        reason: Why not, in words.
        seconds: From start to the reading after it.
        freed_bytes: Used bytes before less after, over all ranks.
        freed_components: The same by component; what is not known is left out.
        held_seconds: For how long new requests waited.
        moment: How its moment was made: ``any`` or ``gate``.
        frees: What it can free, in words; likewise ``does_not_free``, what it cannot.
    """

    remedy: str
    outcome: RemedyOutcome
    reason: str | None = None
    seconds: float | None = None
    freed_bytes: int | None = None
    freed_components: Mapping[str, int] = field(default_factory=dict)
    held_seconds: float | None = None
    moment: str | None = None
    frees: str = ""
    does_not_free: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedOutput:
    """One entry of the encoder cache."""

    mm_hash: str
    bytes: int | None
    embeds: int | None = None
    residency: str | None = None
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """The encoder cache at one moment: of the rank that holds most, as every tensor-parallel rank holds a full copy.

    Attributes:
        title: Of the moment.
        entries: How many items.
        device_bytes: On one device; likewise ``host_bytes``, what was trimmed.
        capacity_embeds: The scheduler's budget.
        largest: The largest entries, largest first.
    """

    title: str
    entries: int | None
    device_bytes: int | None
    host_bytes: int | None
    capacity_embeds: int | None
    largest: tuple[CachedOutput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event of the sidecar's, in short."""

    at: float
    kind: str
    summary: str
    trigger: str | None = None
    rule: str | None = None
    remedy: str | None = None
    outcome: str | None = None
    freed_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule:
    """What the policy was told to watch.

    Attributes:
        high_water: Where it acts; ``None`` where that follows from the engine's plan, rank by rank.
        remedies: What it may run.
        high_free: By rank, with how much less free on the device it acts, in bytes; empty where it watches no device.
    """

    name: str
    signal: str
    high_water: float | None = None
    remedies: tuple[str, ...] = ()
    high_free: Mapping[RankKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The engine's own counts of requests at one reading."""

    at: float
    running: int | None
    waiting: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time without a reading."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment, whole.

    Attributes:
        name: The operator's.
        load: The command.
        engine: As the sidecar saw it before the load.
        device: Of the first rank.
        moments: In order of time.
        series: Every rank's readings, oldest first.
        traffic: The engine's counts, oldest first.
        steps: The remedies, in order.
        caches: The encoder cache, in order of time; none where the model has no such cache.
        events: What happened from the load's start to the end, oldest first.
        policy_mode: ``act`` or ``observe``.
        rules: The policy's.
        settings: The engine's settings that matter for memory, by their flags.
        gaps: Times under the load without a reading.
        stale_seconds: From how long on a gap is one.
        recorded: Whether the workers' recorders told, ten times a second.
        notes: What could not be known, and why.
        version: Of Highwater.
    """

    name: str
    load: LoadRun
    sidecar_url: str
    engine: EngineStatus
    device: Device
    moments: tuple[Moment, ...]
    series: Mapping[RankKey, tuple[RankPoint, ...]] = field(default_factory=dict)
    traffic: tuple[Traffic, ...] = ()
    steps: tuple[RemedyStep, ...] = ()
    caches: tuple[CacheSnapshot, ...] = ()
    events: tuple[Happened, ...] = ()
    policy_mode: str | None = None
    rules: tuple[PolicyRule, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    recorded: bool = False
    notes: tuple[str, ...] = ()
    version: str = ""

    def moment(self, name: str) -> Moment | None:
        """The moment of that name, where it was seen."""
        return next((moment for moment in self.moments if moment.name == name), None)

    @property
    def last(self) -> Moment | None:
        """The last moment that was read."""
        return self.moments[-1] if self.moments else None

    def change(self, earlier: str, later: str, part: str) -> int | None:
        """How a part moved between two moments, over the ranks; ``None`` where it cannot be told of one of them."""
        start, end = self.moment(earlier), self.moment(later)
        if start is None or end is None:
            return None
        return _sum(changes(start, end, part).values())

    def happened(self, kind: str) -> tuple[Happened, ...]:
        """The events of that kind from the load's start to its end."""
        return tuple(
            event
            for event in self.events
            if event.kind == kind and self.load.started_at <= event.at <= self.load.ended_at
        )


def changes(start: Moment, end: Moment, part: str) -> dict[RankKey, int | None]:
    """How a part moved on each rank of either moment; ``None`` where it is not known, or the worker is another one."""
    keys = dict.fromkeys(point.key for moment in (start, end) for point in moment.ranks)
    return {key: _moved(start.rank(key), end.rank(key), part) for key in keys}


def has_restarted(start: Moment, end: Moment) -> bool:
    """Whether a rank is another process at the end than at the start."""
    pids = {point.key: point.pid for point in start.ranks}
    return any(pids.get(point.key, point.pid) != point.pid for point in end.ranks)


def event_of(told: Mapping[str, Any]) -> Happened:
    """An event as the sidecar tells it."""
    result = told.get("result") or {}
    return Happened(
        at=float(told["at"]),
        kind=str(told["kind"]),
        summary=str(told["summary"]),
        trigger=told.get("trigger"),
        rule=told.get("rule"),
        remedy=result.get("remedy"),
        outcome=result.get("outcome"),
        freed_bytes=result.get("freed_bytes"),
    )


def _moved(was: RankPoint | None, now: RankPoint | None, part: str) -> int | None:
    if was is None or now is None or was.pid != now.pid:
        return None
    start, end = was.part(part), now.part(part)
    return None if start is None or end is None else end - start


def _sum(sizes: Iterable[int | None]) -> int | None:
    listed: Sequence[int | None] = list(sizes)
    known = [size for size in listed if size is not None]
    return sum(known) if listed and len(known) == len(listed) else None
