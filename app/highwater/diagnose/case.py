"""The rules' input: each rank's last, first and highest reading, and what is known beside them. Pure.

A case is made from an incident's evidence, a measured load, a report on the engine that runs, its start or its host
memory, or from its set-up. A figure that is not known is ``None``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast, get_args

from highwater.diagnose.evidence import (
    AFTER,
    BEFORE,
    PEAK,
    EncoderEntry,
    Evidence,
    Experiment,
    Headline,
    RankEvidence,
    change,
    risen,
    same_process,
    total,
)
from highwater.diagnose.finding import Where
from highwater.diagnose.log.story import NO_LOG, LogStory
from highwater.explain.explanation import Explanation
from highwater.host.report import GrownPart, HostReport
from highwater.model.components import COMPONENT_NAMES, MemoryPoint, account
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.growth import SeriesGrowth
from highwater.model.rank import Components, Device, RankReading, TorchMemory, WorkerMemory, are_recorded
from highwater.model.report import Event, Report
from highwater.model.units import MIB, span_text

_Parts = TypeVar("_Parts", Components, TorchMemory)
_Known = TypeVar("_Known")

# Of each rank: less than both, in bytes and of its device, moves by itself.
NOTABLE_BYTES, NOTABLE_RATIO = 64 * MIB, 0.005
# From this age on a reading's age is named.
OLD_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCase:
    now: RankReading
    # The first reading of this process that counts: once the engine was ready, or before the load.
    first: RankReading | None = None
    peak: RankReading  # the highest reading; `now` where that is not known apart
    entries: tuple[EncoderEntry, ...] = ()  # the largest known entries of its encoder cache
    # The piece for which its allocator found no place, where the engine's log says so; `now` is then as it stood at
    # that moment.
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
class Setup:
    """How engine and sidecar are set up, as the sidecar itself sees it."""

    now: float  # the sidecar's time, in Unix seconds
    report: Report
    policy_source: str = "settings"  # `settings`, or `put` where it was changed since; `policy_kept_in`: the state file
    policy_kept_in: str | None = None
    incidents: Sequence[Headline] = ()  # newest first; `incidents_folder` is `None` where they are kept in memory only
    incidents_folder: str | None = None
    incidents_problem: str | None = None
    has_engine_log: bool = False
    log_problem: str | None = None  # of `engine_log`, as `recorder_problem` is of `recorder_dir`
    recorder_problem: str | None = None
    events: Sequence[Event] = ()  # newest first

    @property
    def can(self) -> Mapping[str, Any]:
        return self.report.engine.capabilities

    @property
    def only_watches(self) -> bool:
        return not self.can.get("collective_rpc") and are_recorded(self.report.ranks)

    @property
    def reads_workers(self) -> bool:
        return bool(self.can.get("collective_rpc")) or self.only_watches

    @property
    def is_engine_lost(self) -> bool:
        """True if the engine does not run, or will not go on by itself: what it shows no more says nothing of it."""
        traits = self.report.engine.traits
        return traits.is_absent or traits.is_lost

    @property
    def knows_engine(self) -> bool:
        return bool(self.can) and (self.report.engine.traits.answers or self.report.engine.version is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kind: str  # the incident's kind, else where the case is from
    ranks: tuple[RankCase, ...] = ()
    at: float = 0.0
    engine: EngineStatus = field(default_factory=lambda: EngineStatus(url="", state="starting"))
    # The figures of the engine's requests, whichever of both has them.
    load: EngineLoad | EngineStatus = field(default_factory=EngineLoad)
    # The growth of used bytes, over all ranks; `grown`: by component, where its beginning is known.
    grown_bytes: int | None = None
    grown: Mapping[str, int] = field(default_factory=dict)
    since: str = ""  # the time that this growth took, as a part of a sentence
    bytes_per_second: float | None = None  # the pace at the end
    seconds_to_full: float | None = None  # when the first device is full at that pace
    series: tuple[SeriesGrowth, ...] = ()
    evidence: Evidence | None = None  # what was known when an incident opened
    log: LogStory = NO_LOG  # what the engine's log says of an incident; elsewhere it is not read
    experiment: Experiment | None = None
    explanation: Explanation | None = None
    host_report: HostReport | None = None
    host_grown: Sequence[GrownPart] = ()  # what grew in the engine's container, the most first
    setup: Setup | None = None

    @property
    def where(self) -> Where:
        return cast("Where", self.kind) if self.kind in get_args(Where) else "incident"

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
        budgets = () if self.explanation is None else self.explanation.ranks
        is_given = any(rank.now.launch.kv_cache_given for rank in self.ranks)
        return self.log.gives_pool or is_given or any(rank.counting == "given" for rank in budgets)

    @property
    def is_killed_by_kernel(self) -> bool:
        kills = None if self.evidence is None else self.evidence.oom_kills
        return kills is not None and kills.count > 0

    def age_seconds(self, rank: RankCase) -> float:
        return max(self.at - rank.now.taken_at, 0.0)

    def age_text(self, rank: RankCase) -> str:
        seconds = self.age_seconds(rank)
        return f", {span_text(seconds)} before" if seconds >= OLD_SECONDS else ""


def given(part: _Known | None) -> _Known:
    """Return what cases of a rule's own place have; raises LookupError where the rule was asked elsewhere."""
    if part is None:
        raise LookupError("a rule was asked of a case that lacks what it judges")
    return part


# --- an engine that runs ---


def of_report(
    place: Where,
    report: Report,
    *,
    baseline: Iterable[RankReading] = (),
    series: tuple[SeriesGrowth, ...] = (),
    explanation: Explanation | None = None,
    host: HostReport | None = None,
    host_grown: Sequence[GrownPart] = (),
    setup: Setup | None = None,
) -> Case:
    """Return an engine as its report shows it; at its start nothing has happened yet, and its settings count."""
    first = {reading.key: reading for reading in baseline}
    known = () if report.stale and place == "running" else report.ranks
    moved = {name: total(change(first.get(rank.key), rank, name) for rank in known) for name in COMPONENT_NAMES}
    return Case(
        kind=place,
        ranks=tuple(RankCase(now=rank, first=first.get(rank.key), peak=rank) for rank in known),
        at=max((rank.taken_at for rank in known), default=0.0),
        engine=report.engine,
        load=report.engine,
        grown={name: part for name, part in moved.items() if part is not None},
        series=series,
        explanation=explanation,
        host_report=host,
        host_grown=host_grown,
        setup=setup,
    )


# --- a measured load ---


def of_load(experiment: Experiment) -> Case:
    peaks = {each.key: each for each in experiment.ranks(PEAK)}
    entries = next((cache.largest for cache in experiment.caches if cache.title == "after the load"), ())
    ranks = tuple(
        RankCase(
            now=now,
            first=same_process(experiment.ranks(BEFORE), now),
            peak=peaks.get(now.key, now),
            entries=entries,
        )
        for now in experiment.ranks(AFTER)
    )
    moved = {name: experiment.change(BEFORE, AFTER, name) for name in COMPONENT_NAMES}
    return Case(
        kind="load",
        ranks=ranks,
        at=experiment.load.ended_at,
        engine=experiment.engine,
        load=experiment.traffic[-1][1] if experiment.traffic else EngineLoad(),
        grown_bytes=experiment.change(BEFORE, AFTER, "used_bytes"),
        grown={name: part for name, part in moved.items() if part is not None},
        since="under the load",
        experiment=experiment,
    )


# --- an incident ---


def of_incident(evidence: Evidence, log: LogStory = NO_LOG) -> Case:
    """Return an incident as a case: each rank's reading and series become one reading.

    The series may reach further than the last full reading (a recorder writes more often than the poller reads), and
    the reading has figures that a series does not keep. Where PyTorch could not allocate, the figures of its message
    come last.
    """
    ranks = tuple(_rank_case(evidence, rank, log) for rank in evidence.ranks)
    since_ready = any(rank.first is not None for rank in ranks)
    grown: dict[str, int] = {}
    for known, rank in zip(evidence.ranks, ranks, strict=True):
        points = known_points(known)
        if not points or (since_ready and rank.first is None):
            continue
        begun = rank.first or replace(rank.now, components=points[0].components)
        for name in COMPONENT_NAMES:
            if (moved := change(replace(begun, pid=rank.now.pid), rank.now, name)) is not None:
                grown[name] = grown.get(name, 0) + moved
    growth, whole = evidence.growth, evidence.growth.since_ready_bytes
    return Case(
        kind=evidence.kind,
        ranks=ranks,
        at=evidence.at,
        engine=evidence.engine,
        load=evidence.engine,
        grown_bytes=whole if whole is not None else sum(grown.values()) if grown else None,
        grown={name: grown[name] for name in COMPONENT_NAMES if name in grown},
        since="since the engine was ready" if since_ready or whole is not None else "over the minutes that were kept",
        bytes_per_second=growth.bytes_per_second,
        seconds_to_full=growth.seconds_to_full,
        series=growth.series,
        evidence=evidence,
        log=log,
    )


def _rank_case(evidence: Evidence, rank: RankEvidence, log: LogStory) -> RankCase:
    same = (first for first in evidence.baseline if first.key == rank.key)
    first = next((first for first in same if rank.pid is None or first.pid in (None, rank.pid)), None)
    now, failed = latest(rank), None
    pids = {one.pid for one in evidence.ranks}
    # The failure that this rank's allocator alone can have written; none of an engine that only hangs.
    for found in log.failed if evidence.kind != "hung" else ():
        # What a process that is no rank's wrote, such as EngineCore, is quoted from a rank.
        each = found if found.pid in pids else replace(found, pid=None)
        possible_ranks = [
            one
            for one in evidence.ranks
            if each.may_be_of(one.pid, None if one.reading is None else one.reading.total_bytes)
        ]
        if possible_ranks == [rank]:
            failed = each
            break
    if failed is None:
        return RankCase(now=now, first=first, peak=now, entries=rank.entries)
    now = failed.reading(now, evidence.at)
    return RankCase(now=now, first=first, peak=now, entries=rank.entries, failed_allocation_bytes=failed.tried_bytes)


def latest(evidence: RankEvidence) -> RankReading:
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


def _filled(newer: _Parts, older: _Parts) -> _Parts:
    """Take from the older what the newer lacks: a series need not keep all that a reading has."""
    missing = {part.name: getattr(older, part.name) for part in fields(newer) if getattr(newer, part.name) is None}
    return replace(newer, **missing)


def known_points(evidence: RankEvidence) -> tuple[MemoryPoint, ...]:
    if evidence.reading is None:
        return evidence.series
    return tuple(sorted((*evidence.series, MemoryPoint.of(evidence.reading)), key=lambda known: known.at))
