"""The poll loop: makes a round of requests (``rounds``), accounts for the responses, keeps the report, passes it on.

Polls never overlap, keep to a grid without jitter, and never repeat a worker call that has not come back. Where every
rank has a recorder no worker is called to watch it (``round``): vLLM's multiprocess workers spin on a core for a second
after each call (vllm/distributed/device_communicators/shm_broadcast.py, ``SpinCondition``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from highwater.engine.capabilities import Capabilities, setup_hint
from highwater.engine.life import EngineLife, Lives
from highwater.model.components import account
from highwater.model.engine import LOAD_FIGURES, STATES, EngineLoad, EngineStatus, MissingRank, StateTraits
from highwater.model.growth import TRACK_SECONDS, growth_since_ready, without_forecast
from highwater.model.rank import EncoderCacheTotals, RankKey, RankReading, are_recorded
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.process.errors import EngineUnreachable, contained
from highwater.watch.history import History
from highwater.watch.ranks import Replicas, Sizes, best_readings, missing_hint, missing_ranks, workers_left
from highwater.watch.recorder.progress import beside_silent
from highwater.watch.recorder.rank import RankRecord
from highwater.watch.recorder.recorders import Coverage
from highwater.watch.round import EngineVerdict, ProcessSigns, Round, decide
from highwater.watch.rounds import Rounds
from highwater.watch.starts import EngineProcesses, Starts, loading_phase, phases_done


class _Arrival(NamedTuple):
    """The time of a reading, which ages by the monotonic clock: the wall clock may be set."""

    at: float  # Unix seconds, as they were when it came
    mono: float


class Reports:
    """Dates the readings, keeps the report that was made of them last, and passes each one on.

    A report that is older than ``stale_seconds`` is stale. ``last`` is the report as it was made, and ``load`` are the
    engine's last own counts.
    """

    def __init__(self, url: str, clocks: Clocks, stale_seconds: float, *, internal_error: Callable[[], None]) -> None:
        self.last = Report(engine=EngineStatus(url=url, state="starting", hint="not asked yet"))
        self.load = EngineLoad()
        self.listeners: list[Callable[[Report], None]] = []
        self._clocks = clocks
        self._stale_seconds = stale_seconds
        self._internal_error = internal_error
        self._arrivals: dict[RankKey, _Arrival] = {}

    def current(self) -> Report:
        if self.last.taken_at is None:
            return self.last
        aged = replace(self.last, age_seconds=self.age_seconds)
        return stale(aged) if aged.stale or self.age_seconds > self._stale_seconds else aged

    def keep(self, report: Report, load: EngineLoad | None = None) -> None:
        self.last = report
        self.load = load or self.load

    def subscribe(self, listener: Callable[[Report], None]) -> None:
        self.listeners.append(listener)

    def publish(self) -> Report:
        report = self.current()
        for listener in self.listeners:
            name = getattr(listener, "__qualname__", listener)
            # The others must have it, and whoever asked for this round: a relief that is under way, for one.
            with contained(self._internal_error, log, "a listener of reports failed: %s", name):
                listener(report)
        return report

    # --- the time of the readings ---

    @property
    def age_seconds(self) -> float:
        now = self._clocks.monotonic()
        return max((now - arrival.mono for arrival in self._arrivals.values()), default=0.0)

    @property
    def oldest_at(self) -> float:
        """The time of the oldest of the readings, in Unix seconds; now without any."""
        return min((arrival.at for arrival in self._arrivals.values()), default=self._clocks.wall())

    def dated(self, ranks: Sequence[RankReading], records: Sequence[RankRecord]) -> tuple[RankReading, ...]:
        """Return the readings with their ages: a response came now, a record as long ago as its writer's clock says."""
        ages = {record.identity.key: record.reading_age_seconds or 0.0 for record in records}
        now, known, self._arrivals = self._clocks.monotonic(), self._arrivals, {}
        for rank in ranks:
            arrival = known.get(rank.key)
            if arrival is None or arrival.at != rank.taken_at:
                ago = ages.get(rank.key, 0.0) if rank.source == "recorder" else 0.0
                arrival = _Arrival(rank.taken_at, now - ago)
            self._arrivals[rank.key] = arrival
        return tuple(replace(rank, age_seconds=max(now - self._arrivals[rank.key].mono, 0.0)) for rank in ranks)


def stale(report: Report) -> Report:
    return replace(report, stale=True, growth=without_forecast(report.growth))


# The shortest time until the recorders' files are read between two polls; without recorders, until the next poll.
MIN_READ_SECONDS = 0.05
MIN_POLL_SECONDS = 1.0

Pace: TypeAlias = Callable[[Report], float]

log = logging.getLogger("highwater.poller")


class Poller:
    """Polls the engine. ``launched`` returns a reading with what is known of its worker's start and device."""

    def __init__(
        self,
        rounds: Rounds,
        history: History,
        lives: Lives,
        reports: Reports,
        *,
        processes: EngineProcesses,
        launched: Callable[[RankReading, str | None], RankReading],
        internal_error: Callable[[], None],
    ) -> None:
        self.reports = reports
        self.starts = Starts(rounds.url, rounds.clocks, rounds.recorders, lives, history=history, processes=processes)
        self._rounds = rounds
        self._times = rounds.times
        self._recorders = rounds.recorders
        self._clocks = rounds.clocks
        self._history = history
        self._lives = lives
        self._processes = processes
        self._launched = launched
        self._internal_error = internal_error
        self._lock = asyncio.Lock()
        self._verdict = EngineVerdict()
        self._state_since: float | None = None
        self._up_since: float | None = None
        self._replicas = Replicas()
        self._last_start_seconds: float | None = None

    def current(self) -> Report:
        return self.reports.current()

    @property
    def capabilities(self) -> Capabilities:
        return self._rounds.detection.capabilities

    @property
    def coverage(self) -> Coverage:
        return self._rounds.coverage

    @property
    def life(self) -> EngineLife:
        return self._lives.present

    @property
    def _traits(self) -> StateTraits:
        return STATES[self._verdict.state]

    # --- the loop ---

    async def run(self, pace: Pace | None = None) -> None:
        """Poll until cancelled, on a grid that a slow poll does not shift.

        ``pace`` is called after each poll; it returns after how many seconds the memory is read again, if sooner than
        at the next poll: from the recorders' files alone, or, without recorders, by a poll.
        """
        now = asyncio.get_running_loop().time  # what asyncio sleeps by
        next_at = now()
        while True:
            await self._guarded(partial(self.poll, spare_idle=True))
            missed = max(int((now() - next_at) // self._times.poll_seconds), 0)
            next_at += (missed + 1) * self._times.poll_seconds
            while (left := next_at - now()) > 0:
                seconds, read = self._next_read(pace)
                await asyncio.sleep(min(seconds, left))
                if seconds < left:
                    await self._guarded(read)

    async def _guarded(self, read: Callable[[], Awaitable[object]]) -> None:
        # The loop is the product: whatever went wrong in one round, the next must come.
        with contained(self._count_failure, log, "poll failed unexpectedly"):
            await read()

    def _count_failure(self) -> None:
        self._internal_error()
        self._rounds.observer.poll_failed("poller", "unexpected")

    def _next_read(self, pace: Pace | None) -> tuple[float, Callable[[], Awaitable[object]]]:
        seconds = self._times.poll_seconds
        with contained(self._count_failure, log, "the policy's pace failed"):
            seconds = seconds if pace is None else pace(self.current())
        if self._traits.is_up and self.coverage.is_complete:
            return max(seconds, MIN_READ_SECONDS), self.read_recorders
        return max(seconds, MIN_POLL_SECONDS), partial(self.poll, spare_idle=True)

    async def read_recorders(self) -> Report:
        """Read the recorders' files, and nothing else; the engine's state stays as the last poll left it."""
        async with self._lock:
            last = self.reports.last
            seen = await self._rounds.read_recorders(last, self.life.recorder_instance)
            ranks = self._best_readings(seen)
            if ranks is not None:
                self.reports.keep(self._fresh(last.engine, ranks, seen, last.ranks_missing))
                self._history.add(self.reports.last)
        return self.reports.publish()

    async def poll(self, *, spare_idle: bool = False) -> Report:
        """Read all sources now, with ``spare_idle`` only those that are due. Rounds run one after the other."""
        async with self._lock:
            started = self._clocks.monotonic()
            seen = await self._rounds.run(self.reports.last, self.life.recorder_instance, spare_idle=spare_idle)
            self._conclude(seen)
            if self._lives.is_unsaved:
                await asyncio.to_thread(self._lives.save)
            self._rounds.observer.polled(self._clocks.monotonic() - started)
        return self.reports.publish()

    # --- what follows from a round ---

    def _conclude(self, seen: Round) -> None:
        before, most = self._verdict, self._times.max_step_seconds
        seen, ended_seconds = self.starts.note(seen, before)
        was_there = bool(seen.before.last.ranks) and not self.current().stale
        is_lost = seen.contact == "refused" and not seen.is_loading
        ranks = None if is_lost else self._best_readings(seen)
        core, is_held = self._processes.silent_core(), seen.before.last.engine.traits.is_held
        if core is not None and not (is_held or self._traits.is_absent or is_lost):
            # What it hung with it hangs without: clients give up.
            requested_seconds = math.inf if before.state == "stuck" else self._rounds.requested_seconds
            progress = beside_silent(
                seen.progress, core, seen.records, requested_seconds=requested_seconds, max_step_seconds=most
            )
            seen = replace(seen, progress=progress)
        signs = ProcessSigns(
            failure_text=None if seen.failure is None else self.starts.why(seen.failure, seen, before, ended_seconds),
            stopped=self._processes.stopped(),
            is_start_under_way=self.starts.is_under_way,
            ended_seconds=ended_seconds,
        )
        self._verdict = decide(before, seen, signs, self._clocks.monotonic(), max_step_seconds=most)
        if self._traits.is_absent:
            self._up_since = None
        elif self._up_since is None:
            self._up_since = self._clocks.monotonic()
            self.starts.came_up()
        self._note_life(seen, ranks, before, was_there=was_there)
        last = seen.before.last
        missing = last.ranks_missing
        if self._traits.is_absent and (ranks is not None or seen.records):
            missing = ()  # of an engine that has ended none is missing, and while it loads they come one by one
        elif ranks is not None or seen.records:
            sizes = Sizes.of(self.capabilities) or Sizes.recorded(seen.records)
            missing = missing_ranks(sizes, ranks or (), seen.records, last.ranks_missing, last.ranks)
        if self._verdict.since != before.since:
            self._state_since = self._clocks.wall() - (self._clocks.monotonic() - (self._verdict.since or 0.0))
        status = self._status(seen, ranks or (), missing)
        self.reports.keep(self._report(seen, status, ranks, missing), seen.load)
        self._history.add(self.reports.last)
        if before.state != self._verdict.state:
            change = f"engine {before.state} -> {status.state}{f': {status.hint}' if status.hint else ''}"
            self._history.record("state", change, state_before=before.state, state_after=status.state)
            log.warning("%s", change)

    def _note_life(
        self, seen: Round, ranks: tuple[RankReading, ...] | None, before: EngineVerdict, *, was_there: bool
    ) -> None:
        if isinstance(seen.failure, EngineUnreachable):
            self._rounds.detection.detect_again()
        if self._verdict.has_ended and not before.has_ended:
            self._lives.end(self._clocks.wall())
            self._rounds.forget_engine()
        came_up = before.since is not None and (not before.has_answered or before.has_ended)
        has_not_worked = seen.load is not None and seen.load.work_done == 0
        if ranks and self._verdict.state != "gone":  # a dead engine's workers write on, and are no next life
            # An engine that replaced one that was up a moment ago has not worked for long.
            is_watched = came_up or has_not_worked or was_there or seen.is_loading
            if self._lives.observe(ranks, is_watched=is_watched):
                self._rounds.forget_engine()
        elif self._traits.is_up and not self.capabilities.collective_rpc:
            self._lives.came_back()
        if ranks and self._verdict.state == "ready":
            self._lives.keep_baseline(ranks, min(self._clocks.wall() - rank.age_seconds for rank in ranks))
        if self._recorders is not None and self._recorders.files.instance is not None:
            self._lives.follow(self._recorders.files.instance)

    def note_stop(self) -> None:
        """Note that the engine has ended in order, by its log or its workers' files, unless another one runs."""
        if self._traits.is_absent:
            self.starts.note_stop()

    # --- the report ---

    def _best_readings(self, seen: Round) -> tuple[RankReading, ...] | None:
        # The last responses of workers that were left alone still hold.
        holds, now = seen.rested and self._rounds.have_workers_answered, self._clocks.wall()
        best = best_readings(
            # Their own clocks may be another machine's.
            tuple(account(replace(worker, taken_at=now)) for worker in seen.workers or ()),
            seen.records,
            kept=tuple(rank for rank in seen.before.last.ranks if rank.source == "rpc") if holds else (),
            fuller_for_seconds=self._times.idle_poll_seconds,
        )
        return None if best is None else self.reports.dated(best, seen.records)

    def _report(
        self,
        seen: Round,
        status: EngineStatus,
        ranks: tuple[RankReading, ...] | None,
        missing: tuple[MissingRank, ...],
    ) -> Report:
        was, expected, failure = seen.before.last, self._rounds.ranks_expected, self.starts.failure
        if ranks is not None:
            return replace(self._fresh(status, ranks, seen, missing), start_failure=failure)
        is_next = self._verdict.has_ended or seen.is_loading or (was.start_failure and self.starts.is_under_way)
        if status.state == "starting" and is_next:
            # The last readings are those of an engine or a start before this one.
            return Report(engine=status, ranks_expected=expected, start_failure=failure)
        # The last readings stay, with their age, and count as stale where the engine did not confirm them.
        is_stale = was.stale or workers_left(seen.records, expected) is not None or seen.failure is not None
        last = replace(
            was,
            stale=is_stale,
            engine=status,
            ranks_expected=expected,
            ranks_missing=missing,
            progress=seen.progress,
            start_failure=failure,
        )
        return stale(last) if is_stale else last

    def _fresh(
        self, status: EngineStatus, ranks: tuple[RankReading, ...], seen: Round, missing: tuple[MissingRank, ...]
    ) -> Report:
        ranks = tuple(self._launched(rank, self.capabilities.version) for rank in ranks)
        # The memory that an engine takes while it loads is no growth.
        seconds = 0.0 if self._up_since is None else min(self._clocks.monotonic() - self._up_since, TRACK_SECONDS)
        grown = growth_since_ready(self.life.baseline, ranks, self._history.tracks(ranks, seconds))
        grown = replace(grown, reason=self.life.baseline_problem, baseline_taken_at=self.life.baseline_at)
        return Report(
            taken_at=self.reports.oldest_at,
            age_seconds=self.reports.age_seconds,
            stale=False,
            engine=status,
            ranks_expected=self._rounds.ranks_expected,
            ranks_reported=len(ranks),
            ranks=ranks,
            ranks_missing=missing,
            progress=seen.progress,
            encoder_cache=EncoderCacheTotals.of(ranks),
            growth=grown if self._up_since is not None else without_forecast(grown),
        )

    def _status(self, seen: Round, ranks: Sequence[RankReading], missing: Sequence[MissingRank]) -> EngineStatus:
        starved: tuple[str, ...] = ()
        if seen.load is not None and seen.failure is None and not self._traits.is_held:
            starved = self._replicas.starved(seen.load.engines, seen.records, self._clocks.monotonic())
        for sentence in starved if not seen.before.last.engine.starved else ():
            log.warning("%s", sentence)
        load, is_loading = seen.load or EngineLoad(), seen.is_loading
        if self._traits.is_up:
            self._last_start_seconds = self.starts.took_seconds(ranks) or self._last_start_seconds
        done = phases_done(seen.records) if is_loading else ()
        shows_starts = self._recorders is not None and self._recorders.show_starts
        return EngineStatus(
            url=self._rounds.url,
            state=self._verdict.state,
            since=self._state_since,
            started_at=self.life.started_at,
            restarts=self.life.restarts,
            version=self.capabilities.version,
            model=self._rounds.model,
            **{name: getattr(load, name) for name in (*LOAD_FIGURES, "work_done", "work")},
            capabilities=self._rounds.detection.public_capabilities,
            hint="; ".join(filter(None, (*starved, self._hint(seen, ranks, missing)))) or None,
            stopped_at=None if is_loading or self.starts.is_under_way else self.starts.stopped_at,
            starved=starved,
            is_loading=is_loading or (False if shows_starts else None),
            loading_phase=loading_phase(done) if is_loading else None,
            loading_since=self.starts.since(seen.records, is_loading=is_loading) if self._traits.is_absent else None,
            last_start_seconds=self._last_start_seconds,
            loading_process=self.starts.loading_process,
            ended_starts=self.starts.ended_starts,
            extension_versions=self._recorders.extension_versions if self._recorders is not None else (),
        )

    def _hint(self, seen: Round, ranks: Sequence[RankReading], missing: Sequence[MissingRank]) -> str | None:
        if self._verdict.reason is not None:
            return self._verdict.reason
        # Where recorders show every rank, worker calls are not needed: no setup hint.
        setup = None if are_recorded(ranks) else setup_hint(self.capabilities)
        problem = None if self._recorders is None else self._recorders.problem
        if setup is not None or seen.first_failure is not None:
            return "; ".join(text for text in (problem, setup) if text) or seen.first_failure
        if missing:
            known = None if self._recorders is None else problem or ""
            return missing_hint(missing, self._rounds.ranks_expected or 0, known)
        return problem
