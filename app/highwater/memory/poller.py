"""The poll loop: makes a round of requests (``rounds``), accounts for the responses and keeps the report.

Polls never overlap, keep to a grid without jitter, and never repeat a worker call that has not come back. Where every
rank has a recorder no worker is called to watch it (``due``): vLLM's multiprocess workers spin on a core for a second
after each call (vllm/distributed/device_communicators/shm_broadcast.py, ``SpinCondition``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from highwater.accounting.attribution import account
from highwater.accounting.encoder_cache import encoder_totals
from highwater.accounting.growth_since_ready import growth_since_ready, without_forecast
from highwater.accounting.time_to_full import TRACK_SECONDS
from highwater.engine.capabilities import Capabilities
from highwater.engine.hints import (
    dead_text,
    ended_starts_text,
    failure_text,
    loading_text,
    missing_hint,
    setup_hint,
    starting_text,
    stopped_text,
)
from highwater.engine.life import EngineLife, Lives
from highwater.engine.start_attempts import EndedStart
from highwater.engine.verdict import EngineVerdict, Seen, decide, has_responded
from highwater.errors import EngineError, EngineNotListening, EngineUnreachable
from highwater.memory.arrivals import Arrivals
from highwater.memory.history import History
from highwater.memory.ranks import Sizes, best_readings, missing_ranks, workers_left
from highwater.memory.replicas import Replicas
from highwater.memory.rounds import Round, Rounds
from highwater.memory.start_failure import ended_seconds, is_up_by_recorder, ready_at, silent_start
from highwater.readings.engine import LOAD_FIGURES, STATES, EngineLoad, EngineStatus, MissingRank, StartFailure
from highwater.readings.growth import Growth
from highwater.readings.life import ProcessLife
from highwater.readings.rank import RankReading, are_recorded
from highwater.readings.report import Report
from highwater.recorder.coverage import Coverage
from highwater.recorder.progress import SilentCore, beside_silent
from highwater.recorder.rank import processes_of

MAX_ENDED_STARTS = 64
# The shortest time until the recorders' files are read between two polls; without recorders, until the next poll.
MIN_READ_SECONDS = 0.05
MIN_POLL_SECONDS = 1.0

log = logging.getLogger("highwater.poller")


class Poller:
    """Polls the engine and keeps the last report.

    Attributes:
        listeners: Called with each report.
        pace: Called after each poll; returns after how many seconds the memory is read again, if sooner than at the
            next poll: from the recorders' files alone, or, without recorders, by a poll.
        engine_process: Returns name and pid of a process of the engine that runs, as far as one is seen.
        engine_lives: Returns the engine's lives as its processes' files show them, and when they were read, in Unix
            seconds; ``None`` where they are still to be read.
        stopped_engine: Returns which processes of the engine, workers aside, have been stopped for long, in one
            sentence; ``None`` if none. Called once in each poll.
        silent_core: Returns an EngineCore that is silent beside an API server that is not; ``None`` if none.
        unseen_starts: What would show a start that ends, where nothing does: the end of a sentence, or empty.
        launched: Returns a reading with what is known of its worker's start and of its device's other users.
    """

    def __init__(
        self, rounds: Rounds, history: History, lives: Lives, *, internal_error: Callable[[], None] = lambda: None
    ) -> None:
        self.listeners: list[Callable[[Report], None]] = []
        self.pace: Callable[[Report], float] | None = None
        self.engine_process: Callable[[], str | None] = lambda: None
        self.engine_lives: Callable[[], tuple[float, Sequence[ProcessLife]] | None] = lambda: (0.0, ())
        self.stopped_engine: Callable[[], str | None] = lambda: None
        self.silent_core: Callable[[], SilentCore | None] = lambda: None
        self.unseen_starts = ""
        self.launched: Callable[[RankReading, str | None], RankReading] = lambda reading, _: reading
        self.last_load = EngineLoad()
        self._rounds = rounds
        self._times = rounds.times
        self._recorders = rounds.recorders
        self._clock = rounds.clock
        self._history = history
        self._lives = lives
        self._internal_error = internal_error
        self._lock = asyncio.Lock()
        self._verdict = EngineVerdict()
        self._state_since: float | None = None
        self._up_since: float | None = None
        self._start_failure: StartFailure | None = None
        self._stopped_at: float | None = None
        self._ended_starts: deque[EndedStart] = deque(maxlen=MAX_ENDED_STARTS)  # that no report has yet
        self._replicas = Replicas()
        self._arrivals = Arrivals(rounds.clock, rounds.wall_clock)
        self._last = Report(engine=EngineStatus(url=rounds.url, state="starting", hint="not asked yet"))

    def current(self) -> Report:
        if self._last.taken_at is None:
            return self._last
        age = self._arrivals.age_seconds
        aged = replace(self._last, age_seconds=age)
        return _stale(aged) if aged.stale or age > self._times.stale_seconds else aged

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
    def is_start_under_way(self) -> bool:
        return self._lives.attempts.is_under_way

    async def run(self) -> None:
        """Poll until cancelled, on a grid that a slow poll does not shift; in between read as ``pace`` says."""
        now = asyncio.get_running_loop().time  # what asyncio sleeps by
        next_at = now()
        while True:
            await self._guarded(partial(self.poll, spare_idle=True))
            missed = max(int((now() - next_at) // self._times.poll_seconds), 0)
            next_at += (missed + 1) * self._times.poll_seconds
            while (left := next_at - now()) > 0:
                pace, read = self._next_read()
                await asyncio.sleep(min(pace, left))
                if pace < left:
                    await self._guarded(read)

    async def _guarded(self, read: Callable[[], Awaitable[object]]) -> None:
        try:
            await read()
        except Exception:
            # The loop is the product: whatever went wrong in one round, the next must come. It is logged and counted.
            self._internal_error()
            log.exception("poll failed unexpectedly")
            self._rounds.observer.poll_failed("poller", "unexpected")

    def _next_read(self) -> tuple[float, Callable[[], Awaitable[object]]]:
        try:
            seconds = self._times.poll_seconds if self.pace is None else self.pace(self.current())
        except Exception:
            # As above: polls go on without the policy's pace.
            self._internal_error()
            log.exception("the policy's pace failed")
            self._rounds.observer.poll_failed("poller", "unexpected")
            return self._times.poll_seconds, self.read_recorders
        if STATES[self._verdict.state].is_up and self.coverage.is_complete:
            return max(seconds, MIN_READ_SECONDS), self.read_recorders
        return max(seconds, MIN_POLL_SECONDS), partial(self.poll, spare_idle=True)

    async def read_recorders(self) -> Report:
        """Read the recorders' files, and nothing else; the engine's state stays as the last poll left it."""
        async with self._lock:
            outcome = await self._rounds.read_recorders(self._last, self.life.recorder_instance)
            ranks = self._best_readings(outcome)
            if ranks is not None:
                self._last = self._fresh(self._last.engine, ranks, outcome, self._last.ranks_missing)
                self._history.add(self._last)
            report = self.current()
        self._notify(report)
        return report

    def _notify(self, report: Report) -> None:
        for listener in self.listeners:
            try:
                listener(report)
            except Exception:
                # The others must have it, and whoever asked for this round: a relief that is under way, for one.
                self._internal_error()
                log.exception("a listener of reports failed: %s", getattr(listener, "__qualname__", listener))

    async def poll(self, *, spare_idle: bool = False) -> Report:
        """Read all sources now, with ``spare_idle`` only those that are due. Rounds run one after the other."""
        async with self._lock:
            started = time.monotonic()
            outcome = await self._rounds.run(self._last, self.life.recorder_instance, spare_idle=spare_idle)
            report = self._conclude(outcome)
            if self._lives.is_unsaved:
                await asyncio.to_thread(self._lives.save)
            self._rounds.observer.polled(time.monotonic() - started)
        self._notify(report)
        return report

    def _conclude(self, outcome: Round) -> Report:
        was, before = self._last, self._verdict
        self._note_ends(outcome, is_absent=STATES[before.state].is_absent and not has_responded(outcome.contact))
        is_lost = outcome.contact == "refused" and not outcome.is_loading
        ranks = None if is_lost else self._best_readings(outcome)
        core = self.silent_core()
        if core is not None and not was.engine.traits.is_held and not STATES[before.state].is_absent and not is_lost:
            outcome.progress = beside_silent(
                outcome.progress,
                core,
                outcome.records,
                # What it hung with it hangs without: clients give up.
                requested_seconds=math.inf if before.state == "stuck" else self._rounds.requested_seconds,
                max_step_seconds=self._times.max_step_seconds,
            )
        self._verdict = verdict = self._decide(outcome)
        if STATES[verdict.state].is_absent:
            self._up_since = None
        elif self._up_since is None:
            self._up_since, self._start_failure, self._stopped_at = self._clock(), None, None
            self._ended_starts.clear()
        self._note_life(outcome, ranks, before)
        missing = was.ranks_missing if ranks is None and not outcome.records else self._missing(ranks or (), outcome)
        self.last_load = outcome.observation.load or self.last_load
        if verdict.since != before.since:
            self._state_since = self._rounds.wall_clock() - (self._clock() - (verdict.since or 0.0))
        load = outcome.observation.load
        starved: tuple[str, ...] = ()
        if load is not None and outcome.failure is None and not STATES[verdict.state].is_held:
            starved = self._replicas.starved(load.engines, outcome.records, self._clock())
        for sentence in starved if not was.engine.starved else ():
            log.warning("%s", sentence)
        hint = "; ".join(filter(None, (*starved, self._hint(outcome, ranks or (), missing))))
        status = replace(self._status(outcome, hint or None), starved=starved)
        is_next = verdict.has_ended or outcome.is_loading or (was.start_failure and self.is_start_under_way)
        if ranks is None and verdict.state == "starting" and is_next:
            # The last readings are those of an engine or a start before this one.
            self._last = Report(engine=status, ranks_expected=self._rounds.ranks_expected)
        elif ranks is None:
            # The last readings stay, with their age, and count as stale where the engine did not confirm them.
            expected, progress = self._rounds.ranks_expected, outcome.progress
            has_ended = workers_left(outcome.records, expected) is not None
            lost = was.stale or has_ended or outcome.failure is not None
            last = replace(was, engine=status, ranks_expected=expected, ranks_missing=missing, progress=progress)
            self._last = _stale(last) if lost else replace(last, stale=False)
        else:
            self._last = self._fresh(status, ranks, outcome, missing)
        self._last = replace(self._last, start_failure=self._start_failure)
        self._history.add(self._last)
        if before.state != verdict.state:
            change = f"engine {before.state} -> {verdict.state}{f': {status.hint}' if status.hint else ''}"
            self._history.record("state", change)
            log.log(logging.WARNING if status.traits.level == "bad" else logging.INFO, "%s", change)
        return self.current()

    def log_says_start_failed(self, is_silent: bool) -> bool:
        """Note a start that failed by the engine's log, and return whether nothing else has shown it or will."""
        is_another = self._lives.start_failed(self._rounds.wall_clock(), is_silent=is_silent)
        self._start_failure = None if is_another else self._start_failure  # of one before it
        return is_another

    def note_stop(self) -> None:
        """Note that the engine has ended in order, by its log or its workers' files, unless another one runs."""
        if STATES[self._verdict.state].is_absent and self._stopped_at is None:
            self._stopped_at = self._rounds.wall_clock()

    def _note_ends(self, outcome: Round, *, is_absent: bool) -> None:
        """Note the starts that have ended: before the hint, which says so. A report has one of them."""
        seen = self.engine_lives()
        if seen is not None:
            self._ended_starts.extend(self._lives.see(seen[1], seen[0], is_absent=is_absent))
            workers = processes_of(outcome.records)
            if any(not life.is_running and life.processes & workers for life in seen[1]):
                outcome.is_loading = False  # its API server was killed
            outcome.ended_seconds = self._ended_seconds(outcome, seen[1])
        if outcome.ended_workers and self._lives.start_ended(outcome.ended_workers, self._rounds.wall_clock()):
            self._note_failure(outcome.start_failure)
        elif self._ended_starts:
            ended = self._ended_starts.popleft()
            failure = silent_start(ended)
            if ended.may_be_planned:
                self._start_failure = None  # of one before it
                self._history.record("state", failure.summary)
            else:
                self._note_failure(failure)

    def _ended_seconds(self, outcome: Round, lives: Sequence[ProcessLife]) -> float | None:
        verdict, recorders = self._verdict, self._recorders
        if recorders is None or verdict.has_answered or verdict.has_ended or outcome.contact != "refused":
            return None
        # A start that this sidecar has followed to its end is another matter.
        records = outcome.records or recorders.left
        if not recorders.are_here(records):
            return None  # another container's, or another pod's
        is_unseen = {record.identity.instance for record in records} != {outcome.recorder_instance}
        if outcome.records:
            is_unseen = workers_left(records, 0) is None and all(map(is_up_by_recorder, records))
        ended = ended_seconds(records, lives) if is_unseen else None
        if ended is not None and all(record.status == "ended" and is_up_by_recorder(record) for record in records):
            self._stopped_at = self._rounds.wall_clock() - ended
        return ended

    def _note_failure(self, failure: StartFailure | None) -> None:
        if failure is not None:
            self._start_failure, self._stopped_at = failure, None
            self._history.record("state", failure.summary)
            log.warning("%s", failure.summary)

    def _missing(self, ranks: Sequence[RankReading], outcome: Round) -> tuple[MissingRank, ...]:
        if STATES[self._verdict.state].is_absent:
            return ()  # of an engine that has ended none is missing, and while it loads they come one after the other
        sizes = Sizes.of(self.capabilities) or Sizes.recorded(outcome.records)
        was = self._last
        return missing_ranks(sizes, ranks, outcome.records, was.ranks_missing, was.ranks)

    def _decide(self, outcome: Round) -> EngineVerdict:
        load, paused, is_answered = outcome.observation.load, outcome.observation.paused, outcome.failure is None
        ready = ready_at(outcome.records)
        seen = Seen(
            contact=outcome.contact,
            failure=None if outcome.failure is None else self._failure(outcome.failure, outcome),
            is_silent=outcome.contact == "late" and not outcome.serves_models,
            progress=outcome.progress,
            # Workers that responded in this round are not those whose files show their end.
            workers=workers_left(outcome.records, self._rounds.ranks_expected)
            if outcome.observation.workers is None
            else None,
            stopped=self.stopped_engine(),
            is_another_loading=outcome.is_loading or self.is_start_under_way,
            ended_seconds=outcome.ended_seconds,
            ready_seconds=None if ready is None else self._rounds.wall_clock() - ready,
            sleeping=None if load is None else bool(load.sleeping),
            paused=False if paused is None and is_answered and not outcome.rested else paused,
        )
        return decide(self._verdict, seen, self._clock(), max_step_seconds=self._times.max_step_seconds)

    def _note_life(self, outcome: Round, ranks: tuple[RankReading, ...] | None, before: EngineVerdict) -> None:
        if isinstance(outcome.failure, EngineUnreachable):
            self._rounds.detection.detect_again()
        at = self._rounds.wall_clock()
        if self._verdict.has_ended and not before.has_ended:
            self._lives.end(at)
            self._rounds.forget_engine()
        load = outcome.observation.load
        came_up = before.since is not None and (not before.has_answered or before.has_ended)
        has_not_worked = load is not None and load.work_done == 0
        if ranks:
            # An engine that replaced one that was up a moment ago has not worked for long.
            was_there = bool(self._last.ranks) and not self.current().stale
            is_watched = came_up or has_not_worked or was_there or outcome.is_loading
            if self._lives.observe(ranks, is_watched=is_watched):
                self._rounds.forget_engine()
        elif STATES[self._verdict.state].is_up and not self.capabilities.collective_rpc:
            self._lives.came_back()
        if ranks and self._verdict.state == "ready":
            self._lives.keep_baseline(ranks)
        if self._recorders is not None and self._recorders.files.instance is not None:
            self._lives.follow(self._recorders.files.instance)

    def _best_readings(self, outcome: Round) -> tuple[RankReading, ...] | None:
        # The last responses of workers that were left alone still hold.
        holds = outcome.rested and self._rounds.have_workers_answered
        return best_readings(
            tuple(map(account, outcome.observation.workers or ())),
            outcome.records,
            kept=tuple(rank for rank in self._last.ranks if rank.source == "rpc") if holds else (),
            fuller_for_seconds=self._times.idle_poll_seconds,
        )

    def _fresh(
        self, status: EngineStatus, ranks: tuple[RankReading, ...], outcome: Round, missing: tuple[MissingRank, ...]
    ) -> Report:
        dated = self._arrivals.dated(ranks, outcome.records)
        ranks = tuple(self.launched(rank, self.capabilities.version) for rank in dated)
        return Report(
            taken_at=self._arrivals.taken_at,
            age_seconds=self._arrivals.age_seconds,
            stale=False,
            engine=status,
            ranks_expected=self._rounds.ranks_expected,
            ranks_reported=len(ranks),
            ranks=ranks,
            ranks_missing=missing,
            progress=outcome.progress,
            encoder_cache=encoder_totals(ranks),
            growth=self._growth(ranks),
        )

    def _growth(self, ranks: tuple[RankReading, ...]) -> Growth:
        # The memory that an engine takes while it loads is no growth.
        seconds = 0.0 if self._up_since is None else min(self._clock() - self._up_since, TRACK_SECONDS)
        tracks = self._history.tracks(ranks, seconds)
        grown = replace(growth_since_ready(self.life.baseline, ranks, tracks), reason=self.life.baseline_problem)
        return grown if self._up_since is not None else without_forecast(grown)

    def _status(self, outcome: Round, hint: str | None) -> EngineStatus:
        load, recorders = outcome.observation.load or EngineLoad(), self._recorders
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
            hint=hint,
            stopped_at=None if outcome.is_loading or self._lives.attempts.is_under_way else self._stopped_at,
            is_loading=outcome.is_loading or (False if self._sees_starts else None),
            extension_versions=recorders.extension_versions if recorders is not None else (),
        )

    @property
    def _sees_starts(self) -> bool:
        return self._recorders is not None and self._recorders.show_starts

    def _failure(self, failure: EngineError, outcome: Round) -> str:
        url, attempts = self._rounds.url, self._lives.attempts
        last, at = attempts.last, self._rounds.wall_clock()
        earlier = "" if last is None else ended_starts_text(last, attempts.failed, at)
        if outcome.is_loading:
            starts = [record.table.start for record in outcome.records if record.table is not None]
            return loading_text(min(starts, key=len, default=()), url) + (f"; before, {earlier}" if earlier else "")
        verdict, ended = self._verdict, outcome.ended_seconds
        known = verdict.has_answered or verdict.has_ended or ended is not None or bool(self.life.processes)
        is_loading = self.is_start_under_way if verdict.has_ended else verdict.state == "starting" and ended is None
        is_silent = is_loading and isinstance(failure, EngineNotListening)
        # Of an engine that was there, a process that is left says nothing of a start: it may outlive the engine.
        process = self.engine_process() if is_silent and (attempts.is_under_way or not known) else None
        if process is not None:
            return starting_text(process, failure, url, earlier)
        stopped = "" if self._stopped_at is None or attempts.is_under_way else stopped_text(self._stopped_at)
        if stopped or (earlier and isinstance(failure, EngineNotListening)):
            return f"{stopped or earlier}. Nothing answers at {url} ({failure})"
        text = failure_text(failure, url, is_up=STATES[verdict.state].is_up, was_there=known)
        dead_seconds = self._clock() - (verdict.since or 0.0) if verdict.state == "gone" else ended
        if dead_seconds is not None:
            was_seen = verdict.has_answered or bool(self.life.processes)
            return dead_text(text, dead_seconds, sees_starts=self._sees_starts, was_seen=was_seen)
        return text + (self.unseen_starts if is_silent and not known else "")

    def _hint(self, outcome: Round, ranks: Sequence[RankReading], missing: Sequence[MissingRank]) -> str | None:
        if self._verdict.reason is not None:
            return self._verdict.reason
        recorders = self._recorders
        # Where recorders show every rank, worker calls are not needed: no setup hint.
        setup = None if are_recorded(ranks) else setup_hint(self.capabilities)
        problem = None if recorders is None else recorders.problem
        if setup is not None or outcome.first_failure is not None:
            return "; ".join(text for text in (problem, setup) if text) or outcome.first_failure
        if missing:
            known = None if recorders is None else problem or ""
            return missing_hint(missing, self._rounds.ranks_expected or 0, known)
        return problem


def _stale(report: Report) -> Report:
    return replace(report, stale=True, growth=without_forecast(report.growth))
