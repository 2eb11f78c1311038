"""The order of events: a mark, the load with a reader beside it, a mark, the remedies one by one, and what came of it.

Everything that can be wrong is found out before the load starts. From then on nothing ends an experiment but the load
itself or a second Ctrl-C, and even then what is known is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from highwater import __version__
from highwater.accounting.attribution import rank_key
from highwater.client.answers import ranks_of, remedy_of, report_of, understood
from highwater.client.sidecar import SidecarClient
from highwater.errors import SidecarError, SidecarRefused
from highwater.findings.case import name_of
from highwater.measure.command_line import masked, shown_command
from highwater.measure.experiment import (
    AFTER,
    BEFORE,
    PEAK,
    READY,
    CacheReading,
    Experiment,
    LoadRun,
    Moment,
    RankKey,
    has_restarted,
)
from highwater.measure.interrupts import Interrupts
from highwater.measure.load import Load, shell_code
from highwater.measure.readings import cache_of, history_ranks, settings_of
from highwater.measure.sampler import Sampler
from highwater.measure.series import peaks, usual_gap
from highwater.readings import RankReading, RemedyResult, Report
from highwater.text.printable import plain
from highwater.units import mib

PROGRESS_SECONDS = 30.0
# The sidecar asks the workers for the entries once a second at most.
ENTRIES_SECONDS = 1.2
# How long before the load the sidecar's readings are looked at, for how often it reads.
LOOK_BACK_SECONDS = 120.0
SHOWN_LENGTH = 300
# A little of what was before belongs to the timeline.
LEAD_SECONDS = 3.0


class CannotMeasure(SidecarError):
    """It cannot begin; the message is one line that says why, and what to do."""


@dataclass(kw_only=True)
class LoadPlan:
    """The plan of a measurement.

    Attributes:
        name: Stands before the marks' names.
        command: The load.
        remedies: In this order, each in safe mode.
        settle_seconds: How long to wait between the load's end and the reading after it.
    """

    name: str
    command: tuple[str, ...]
    remedies: tuple[str, ...] = ()
    settle_seconds: float = 0.0


@dataclass
class _Progress:
    """The knowledge of a measurement under way."""

    report: Report
    started_at: float
    ready: tuple[RankReading, ...] = ()
    gap_seconds: float = 0.0
    ended_at: float | None = None
    settings: dict[str, str] = field(default_factory=dict)
    after: Moment | None = None
    afters: list[Moment] = field(default_factory=list)
    remedies: list[RemedyResult] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    caches: list[CacheReading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Measurement:
    """One measured load under way.

    Args:
        plan: What is to be done.
        client: The sidecar.
        reader: The same, for the thread beside the load.
        interrupts: Who hears the signals to stop.
        say: Takes a line of progress.

    Attributes:
        complete: Whether everything went as planned on our side; what the load did is another matter.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        client: SidecarClient,
        reader: SidecarClient,
        interrupts: Interrupts,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._client, self._reader = plan, client, reader
        self._interrupts, self._say = interrupts, say
        self.complete = True
        self._was_interrupted = False
        self._spoke_at = self._entries_at = 0.0

    def run(self) -> Experiment:
        """Do it.

        Raises:
            CannotMeasure: There is no engine to observe, or nothing is reported of its memory.
            SidecarError: The sidecar is not there, or lets nobody mark; the load has not been started.
            LoadNotStarted: The load cannot be run.
        """
        known = self._prepare()
        load = Load(self._plan.command, self._interrupts)
        sampler = Sampler(self._reader, known.started_at - LEAD_SECONDS, known.gap_seconds)
        with sampler:
            try:
                self._under_load(load, sampler)
                self._ended(known, load)
                self._afterwards(known, sampler)
            except KeyboardInterrupt:
                self.complete = False
                known.notes.append("Stopped by Ctrl-C: what should have followed is missing.")
            except SidecarError as exc:
                self._lost(known, exc)
            self._finish(known, sampler)
        return self._experiment(known, sampler, self._load_run(known, load))

    # --- before the load ---

    def _prepare(self) -> _Progress:
        # Without the token first: it is for a sidecar only.
        _judge(report_of(self._reader.get("/memory")), self._client.url)
        # A mark needs the token and makes the sidecar read: what is wrong with either is found out here.
        started_at = self._mark("load starts")
        report = report_of(self._reader.get("/memory"))
        _judge(report, self._client.url)
        known = _Progress(report, started_at=started_at)
        known.ready = self._ready(report, known)
        known.gap_seconds = self._usual_gap(known.started_at)
        with self._noting(known, "the engine's settings"):
            known.settings = settings_of(self._client.get("/server_info", {"config_format": "json"}))
        self._snapshot(known, "before the load", Moment(name=BEFORE, title="", at=None, ranks=report.ranks))
        return known

    def _ready(self, report: Report, known: _Progress) -> tuple[RankReading, ...]:
        """The first reading after the engine was ready, where the sidecar still has it."""
        since = report.growth.baseline_taken_at
        if since is None:
            return ()
        answer = self._reader.get("/memory/history", {"since": f"{since - 0.001:.6f}"})
        with understood("/memory/history"):
            first = answer["readings"][:1]
            # Of a long history the sidecar sends each step's last reading, and not its first.
            if first and float(first[0]["at"]) - since <= max(2 * float(answer["step"]), 1.0):
                return tuple(history_ranks(first))
        known.notes.append(
            "What was in use when the engine was ready is not shown: the sidecar's history does not reach back so far."
        )
        return ()

    def _usual_gap(self, now: float) -> float:
        answer = self._reader.get("/memory/history", {"since": f"{now - LOOK_BACK_SECONDS:.6f}"})
        with understood("/memory/history"):
            return usual_gap([float(reading["at"]) for reading in answer["readings"]])

    # --- the load ---

    def _under_load(self, load: Load, sampler: Sampler) -> None:
        self._say(f"load starts: {shown_command(masked(self._plan.command), SHOWN_LENGTH)}")
        self._interrupts.is_patient = True
        try:
            load.run(lambda: self._progress(load, sampler))
        finally:
            self._interrupts.is_patient = False
            self._was_interrupted = self._interrupts.count > 0

    def _progress(self, load: Load, sampler: Sampler) -> None:
        now = time.monotonic()
        self._spoke_at = max(self._spoke_at, load.started)
        if now - self._spoke_at < PROGRESS_SECONDS:
            return
        self._spoke_at = now
        point = sampler.highest()
        used = "" if point is None else f", {name_of(point)} at {mib(point.used_bytes)} MiB"
        trouble = f"; {sampler.problem}" if sampler.problem else ""
        self._say(f"load runs for {now - load.started:.0f} s{used}{trouble}")

    def _ended(self, known: _Progress, load: Load) -> None:
        """Mark the end; without a sidecar its time is taken from our own clock."""
        known.ended_at = known.started_at + load.seconds
        known.ended_at = self._mark("load ended")

    # --- afterwards ---

    def _afterwards(self, known: _Progress, sampler: Sampler) -> None:
        self._settle()
        at = self._mark("settled")
        report = report_of(self._reader.get("/memory"))
        if report.ranks:
            known.after = Moment(name=AFTER, title="after load", at=at, ranks=report.ranks)
            self._snapshot(known, "after the load", known.after)
        if report.stale:
            known.notes.append("The reading after the load is stale: the engine did not answer for its memory.")
        sampler.read()
        self._remedies(known, sampler)

    def _settle(self) -> None:
        if not self._plan.settle_seconds or self._interrupts.count:
            return
        try:
            self._say(f"load ended; waiting {self._plan.settle_seconds:g} s for the memory to settle")
            time.sleep(self._plan.settle_seconds)
        except KeyboardInterrupt:
            if self._interrupts.count > 1:
                raise

    def _remedies(self, known: _Progress, sampler: Sampler) -> None:
        known.not_tried = list(self._plan.remedies)
        while known.not_tried and not self._interrupts.count:
            self._say(f"remedy {known.not_tried[0]}")
            known.remedies.append(self._remedy(known, known.not_tried[0]))
            sampler.add(known.afters[-1].ranks if known.afters else ())
            known.not_tried.pop(0)

    def _remedy(self, known: _Progress, name: str) -> RemedyResult:
        try:
            answer = self._client.post("/memory/reclaim", {"remedies": [name], "mode": "safe"})
        except SidecarRefused as exc:
            if not isinstance(exc.body, dict) or not exc.body.get("results"):
                return RemedyResult(remedy=name, outcome="failed", reason=str(exc))
            answer = exc.body
        except SidecarError as exc:
            return RemedyResult(remedy=name, outcome="failed", reason=str(exc))
        with understood("/memory/reclaim"):
            data = answer["results"][-1]
            result = remedy_of(data)
            if result.outcome == "done":
                ranks = ranks_of(data["after"])
                known.afters.append(Moment(name=f"after {name}", title=f"after {name}", at=_at(ranks), ranks=ranks))
        what = f": {result.reason}" if result.reason else f", freed {mib(result.freed_bytes)} MiB"
        self._say(f"  {result.outcome}{what}")
        return result

    def _finish(self, known: _Progress, sampler: Sampler) -> None:
        if self._interrupts.count > 1:
            return
        last = known.afters[-1] if known.afters else None
        if last is not None:
            self._snapshot(known, last.title, last)
        sampler.read()
        if sampler.problem:
            known.notes.append(f"The last reading failed: {sampler.problem}")

    # --- with the sidecar ---

    def _mark(self, what: str) -> float:
        answer = self._client.post("/memory/marks", {"name": f"{self._plan.name}: {what}"})
        with understood("/memory/marks"):
            return float(answer["at"])

    def _snapshot(self, known: _Progress, title: str, moment: Moment) -> None:
        if not any(reading.encoder_cache for reading in moment.ranks):
            return
        time.sleep(max(0.0, self._entries_at + ENTRIES_SECONDS - time.monotonic()))
        with self._noting(known, f"the encoder cache's entries {title}"):
            seen = cache_of(title, self._client.get("/memory/encoder-cache", {"limit": "5"}), moment)
            self._entries_at = time.monotonic()
            known.caches += [seen] if seen is not None else []

    @contextmanager
    def _noting(self, known: _Progress, what: str) -> Iterator[None]:
        """Note a failure of something that a report can do without."""
        try:
            yield
        except SidecarError as exc:
            known.notes.append(f"Not known: {what} ({exc}).")

    def _lost(self, known: _Progress, exc: SidecarError) -> None:
        self.complete = False
        self._say(str(exc))
        known.notes.append(f"The sidecar was lost: {exc}")

    # --- what came of it ---

    def _load_run(self, known: _Progress, load: Load) -> LoadRun:
        exit_code, signal_name = shell_code(load.code)
        return LoadRun(
            command=masked(self._plan.command),
            started_at=known.started_at,
            ended_at=known.started_at + load.seconds if known.ended_at is None else known.ended_at,
            seconds=load.seconds,
            exit_code=exit_code,
            signal_name=signal_name,
            interrupted=self._was_interrupted,
        )

    def _experiment(self, known: _Progress, sampler: Sampler, load: LoadRun) -> Experiment:
        series = sampler.series.points()
        return Experiment(
            name=self._plan.name,
            load=load,
            sidecar_url=self._client.url,
            engine=known.report.engine,
            device=known.report.ranks[0].device,
            moments=tuple(_moments(known, series, load)),
            series=series,
            traffic=tuple(sampler.traffic),
            remedies=tuple(known.remedies),
            not_tried=tuple(known.not_tried),
            caches=tuple(known.caches),
            events=tuple(event for event in sampler.events if event.at >= load.started_at),
            policy=known.report.policy,
            settings=known.settings,
            gaps=sampler.series.gaps_within(load.started_at, load.ended_at),
            recorded=sampler.recorded,
            notes=tuple(known.notes),
            version=__version__,
        )


def _judge(report: Report, url: str) -> None:
    engine = report.engine
    if not engine.traits.is_up or engine.state == "sleeping":
        todo = {"starting": "wait until it is ready", "sleeping": "wake it up"}.get(engine.state, "start it")
        why = f" ({plain(engine.hint)})" if engine.hint else ""
        raise CannotMeasure(
            f"the sidecar at {url} has no engine that is ready: {plain(engine.url)} is {engine.state}{why}; "
            f"{todo}, then try again"
        )
    if not report.ranks:
        hint = engine.hint or "its workers report nothing of their memory yet; wait a moment and try again"
        raise CannotMeasure(f"the sidecar at {url} has no reading of the engine's memory: {plain(hint)}")


def _moments(known: _Progress, series: Mapping[RankKey, Sequence[RankReading]], load: LoadRun) -> Iterator[Moment]:
    ranks = known.report.ranks
    before = Moment(name=BEFORE, title="before load", at=load.started_at, ranks=ranks)
    if known.ready:
        ready = Moment(name=READY, title="ready", at=_at(known.ready), ranks=known.ready)
        if not has_restarted(ready, before):
            yield ready
    yield before
    best = {rank_key(each): each for each in peaks(series.values(), load.started_at, load.ended_at)}
    for reading in (*ranks, *(known.after.ranks if known.after is not None else ())):
        held = best.get(rank_key(reading))
        if reading.used_bytes is not None and (held is None or reading.used_bytes > (held.used_bytes or 0)):
            best[rank_key(reading)] = reading
    if best:
        # A recorder's sample knows less than a reading: the device does not grow under a load.
        totals = {rank_key(reading): reading.total_bytes for reading in ranks}
        highest = tuple(replace(best[key], total_bytes=totals.get(key)) for key in sorted(best))
        yield Moment(name=PEAK, title="peak under load", at=None, ranks=highest)
    if known.after is not None:
        yield known.after
    yield from known.afters


def _at(ranks: Sequence[RankReading]) -> float | None:
    return max((reading.taken_at for reading in ranks), default=None)
