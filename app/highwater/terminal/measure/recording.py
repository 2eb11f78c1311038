"""The order of events: a mark, the load with a reader beside it, a mark, the remedies one by one, and the results.

Every problem that can be known before the load is reported before it. From then on nothing ends an experiment but the
load itself or a second Ctrl-C, and even then what is known is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from highwater import __version__
from highwater.diagnose.evidence import (
    AFTER,
    BEFORE,
    PEAK,
    READY,
    CacheReading,
    Experiment,
    LoadRun,
    Moment,
    has_restarted,
)
from highwater.model.rank import RankReading
from highwater.model.remedies import RemedyResult
from highwater.model.report import Report
from highwater.model.units import gib_text
from highwater.process.errors import SidecarError, SidecarRefused
from highwater.process.untrusted import plain
from highwater.terminal.client import SidecarClient, ranks_of, remedy_of, report_of, understood
from highwater.terminal.measure.load import Interrupts, Load, masked, shell_code, shown_command
from highwater.terminal.measure.sampler import (
    GAP_SECONDS,
    Sampler,
    cache_of,
    history_ranks,
    peaks,
    settings_of,
    usual_gap,
)

PROGRESS_SECONDS = 30.0
# The sidecar calls the workers for the entries at most once a second.
ENTRIES_SECONDS = 1.2
# The time before the load whose readings show how often the sidecar reads.
LOOK_BACK_SECONDS = 120.0
SHOWN_LENGTH = 300
# A little of the time before belongs to the timeline.
LEAD_SECONDS = 3.0


class CannotMeasure(SidecarError):
    """It cannot begin; the message is one line that says why, and what to do."""


@dataclass(eq=False)
class Measurement:
    """One measured load under way.

    ``name`` is the report's title, and the prefix of the marks' names. The remedies are tried in this order, each in
    safe mode. ``reader`` is the client of the thread beside the load. ``complete`` tells of every step but the load
    itself.
    """

    name: str
    command: tuple[str, ...]
    remedies: tuple[str, ...]
    settle_seconds: float
    client: SidecarClient
    reader: SidecarClient
    interrupts: Interrupts
    say: Callable[[str], None]
    complete: bool = True
    _was_interrupted: bool = False
    _spoke_at: float = 0.0
    _entries_at: float = 0.0
    _started_at: float = 0.0
    _ended_at: float | None = None
    _gap_seconds: float = GAP_SECONDS
    _settings: Mapping[str, str] = field(default_factory=dict)
    _ready: tuple[RankReading, ...] = ()
    _after: list[Moment] = field(default_factory=list)
    _results: list[RemedyResult] = field(default_factory=list)
    _not_tried: tuple[str, ...] = ()
    _caches: list[CacheReading] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    def run(self) -> Experiment:
        """Measure. Raises what ends it before the load starts.

        CannotMeasure: there is no engine to observe, or nothing is reported of its memory. SidecarError: no sidecar
        responds, or it refuses marks. LoadNotStarted: the load cannot be run.
        """
        report = self._prepare()
        load = Load(self.command, self.interrupts)
        with Sampler(self.reader, self._started_at - LEAD_SECONDS, self._gap_seconds) as sampler:
            try:
                self.say(f"load starts: {shown_command(masked(self.command), SHOWN_LENGTH)}")
                self.interrupts.is_patient = True
                try:
                    load.run(lambda: self._progress(load, sampler))
                finally:
                    self.interrupts.is_patient = False
                    self._was_interrupted = self.interrupts.count > 0
                # Without a sidecar the end's time is computed from the duration.
                self._ended_at = self._started_at + load.seconds
                self._ended_at = self._mark("load ended")
                self._read_after(sampler)
                self._not_tried = self.remedies
                while self._not_tried and not self.interrupts.count:
                    self.say(f"remedy {self._not_tried[0]}")
                    self._results.append(self._remedy(self._not_tried[0]))
                    last = self._after[-1] if self._after else None
                    sampler.add(last.ranks if last is not None and last.name != AFTER else ())
                    self._not_tried = self._not_tried[1:]
            except KeyboardInterrupt:
                self.complete = False
                self._notes.append("Stopped by Ctrl-C: what should have followed is missing.")
            except SidecarError as exc:
                self.complete = False
                self.say(str(exc))
                self._notes.append(f"The sidecar was lost: {exc}")
            if self.interrupts.count <= 1:
                if self._after and self._after[-1].name != AFTER:
                    self._read_cache(self._after[-1].title, self._after[-1])
                sampler.read()
                if sampler.problem:
                    self._notes.append(f"The last reading failed: {sampler.problem}")
        return self._experiment(report, sampler, load)

    # --- before the load ---

    def _prepare(self) -> Report:
        # Without the token first: it is for a sidecar only.
        _check(report_of(self.reader.get("/memory")), self.client.url)
        # A mark needs the token and makes the sidecar read: a problem with either shows here.
        self._started_at = self._mark("load starts")
        report = report_of(self.reader.get("/memory"))
        _check(report, self.client.url)
        ready_at = report.growth.baseline_taken_at
        if ready_at is not None:
            history = self.reader.get("/memory/history", {"since": f"{ready_at - 0.001:.6f}"})
            with understood("/memory/history"):
                first = history["readings"][:1]
                # Of a long history the sidecar sends each step's last reading, and not its first.
                if first and float(first[0]["at"]) - ready_at <= max(2 * float(history["step"]), 1.0):
                    self._ready = tuple(history_ranks(first))
                else:
                    self._notes.append(
                        "What was in use when the engine was ready is not shown: the sidecar's history does not reach "
                        "back so far."
                    )
        before = self.reader.get("/memory/history", {"since": f"{self._started_at - LOOK_BACK_SECONDS:.6f}"})
        with understood("/memory/history"):
            self._gap_seconds = usual_gap([float(reading["at"]) for reading in before["readings"]])
        with self._noting("the engine's settings"):
            self._settings = settings_of(self.client.get("/server_info", {"config_format": "json"}))
        self._read_cache("before the load", Moment(name=BEFORE, title="", at=None, ranks=report.ranks))
        return report

    # --- the load ---

    def _progress(self, load: Load, sampler: Sampler) -> None:
        now = time.monotonic()
        self._spoke_at = max(self._spoke_at, load.started)
        if now - self._spoke_at < PROGRESS_SECONDS:
            return
        self._spoke_at = now
        point = sampler.highest()
        used = "" if point is None else f", {point.name} at {gib_text(point.used_bytes)}"
        trouble = f"; {sampler.problem}" if sampler.problem else ""
        self.say(f"load runs for {now - load.started:.0f} s{used}{trouble}")

    # --- afterwards ---

    def _read_after(self, sampler: Sampler) -> None:
        if self.settle_seconds and not self.interrupts.count:
            try:
                self.say(f"load ended; waiting {self.settle_seconds:g} s for the memory to settle")
                time.sleep(self.settle_seconds)
            except KeyboardInterrupt:
                if self.interrupts.count > 1:
                    raise
        at = self._mark("settled")
        report = report_of(self.reader.get("/memory"))
        if report.ranks:
            self._after.append(Moment(name=AFTER, title="after load", at=at, ranks=report.ranks))
            self._read_cache("after the load", self._after[0])
        if report.stale:
            self._notes.append("The reading after the load is stale: the engine did not answer for its memory.")
        sampler.read()

    def _remedy(self, name: str) -> RemedyResult:
        try:
            response = self.client.post("/memory/reclaim", {"remedies": [name], "mode": "safe"})
        except SidecarRefused as exc:
            if not isinstance(exc.body, dict) or not exc.body.get("results"):
                return RemedyResult(remedy=name, outcome="failed", reason=str(exc))
            response = exc.body
        except SidecarError as exc:
            return RemedyResult(remedy=name, outcome="failed", reason=str(exc))
        with understood("/memory/reclaim"):
            data = response["results"][-1]
            result = remedy_of(data)
            if result.outcome == "done":
                ranks, after = ranks_of(data["after"]), f"after {name}"
                self._after.append(Moment(name=after, title=after, at=_newest(ranks), ranks=ranks))
        what = f": {result.reason}" if result.reason else f", gave back {gib_text(result.credited_bytes)}"
        self.say(f"  {result.outcome}{what}")
        return result

    # --- with the sidecar ---

    def _mark(self, what: str) -> float:
        response = self.client.post("/memory/marks", {"name": f"{self.name}: {what}"})
        with understood("/memory/marks"):
            return float(response["at"])

    def _read_cache(self, title: str, moment: Moment) -> None:
        if not any(reading.encoder_cache for reading in moment.ranks):
            return
        time.sleep(max(0.0, self._entries_at + ENTRIES_SECONDS - time.monotonic()))
        with self._noting(f"the encoder cache's entries {title}"):
            cache = cache_of(title, self.client.get("/memory/encoder-cache", {"limit": "5"}), moment)
            self._entries_at = time.monotonic()
            self._caches += [cache] if cache is not None else []

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except SidecarError as exc:
            self._notes.append(f"Not known: {what} ({exc}).")

    # --- the experiment ---

    def _experiment(self, report: Report, sampler: Sampler, ran: Load) -> Experiment:
        exit_code, signal_name = shell_code(ran.code)
        load = LoadRun(
            command=masked(self.command),
            started_at=self._started_at,
            ended_at=self._started_at + ran.seconds if self._ended_at is None else self._ended_at,
            seconds=ran.seconds,
            exit_code=exit_code,
            signal_name=signal_name,
            interrupted=self._was_interrupted,
        )
        series = sampler.series.points()
        before = Moment(name=BEFORE, title="before load", at=load.started_at, ranks=tuple(report.ranks))
        moments = [before]
        if self._ready:
            ready = Moment(name=READY, title="ready", at=_newest(self._ready), ranks=self._ready)
            if not has_restarted(ready, before):
                moments.insert(0, ready)
        under_load = (reading for points in series.values() for reading in points if load.lasted(reading.taken_at))
        after = self._after[0].ranks if self._after and self._after[0].name == AFTER else ()
        best = peaks((*under_load, *report.ranks, *after))
        if best:
            peak = tuple(best[key] for key in sorted(best))
            moments.append(Moment(name=PEAK, title="peak under load", at=None, ranks=peak))
        return Experiment(
            name=self.name,
            load=load,
            sidecar_url=self.client.url,
            engine=report.engine,
            device=report.ranks[0].device,
            moments=(*moments, *self._after),
            series=series,
            traffic=tuple(sampler.traffic),
            remedies=tuple(self._results),
            not_tried=self._not_tried,
            caches=tuple(self._caches),
            events=tuple(event for event in sampler.events if event.at >= load.started_at),
            policy=report.policy,
            settings=self._settings,
            gaps=sampler.series.gaps_within(load.started_at, load.ended_at),
            recorded=sampler.recorded,
            notes=tuple(self._notes),
            version=__version__,
        )


def _check(report: Report, url: str) -> None:
    """Raise ``CannotMeasure`` without an engine that is ready, or without a reading of its memory."""
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


def _newest(ranks: Sequence[RankReading]) -> float | None:
    return max((reading.taken_at for reading in ranks), default=None)
