"""The loop: ask every source, account for what they say, keep the report. Decides nothing.

Polls never overlap, keep to a grid without jitter, and never repeat a worker call that has not come back. While the
engine is idle the workers are asked less often: vLLM's multiprocess workers spin on a core for a second after each call
(vllm/distributed/device_communicators/shm_broadcast.py, ``SpinCondition``), so that a call a second would keep a core
busy for each rank, and nothing moves in an idle engine. Where every rank has a recorder, its file is read, and a
call is only the sign that the engine's loop still answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from highwater.accounting.attribution import account, encoder_totals, growth, rank_key, without_forecast
from highwater.engine.capabilities import Capabilities, detect
from highwater.engine.client import Engine
from highwater.engine.hints import failure_text, missing_hint, setup_hint
from highwater.engine.life import EngineLife, Lives
from highwater.engine.verdict import Contact, EngineVerdict, Seen, decide
from highwater.errors import EngineError, EngineNotListening, EngineRefused, EngineUnreachable, EngineUnresponsive
from highwater.memory.history import History
from highwater.memory.ranks import best_readings, is_complete, missing_ranks, workers_left
from highwater.memory.sources import Observation, Source
from highwater.memory.sources.workers import Workers
from highwater.readings import STATES, EngineLoad, EngineStatus, Growth, MissingRank, Progress, RankReading, Report
from highwater.recorder.folder import RankRecord
from highwater.recorder.recorders import Recorders

GROWTH_SECONDS = 60.0
SERVER_ERROR = 500
# A quick look at the recorders' files, between two polls, comes no sooner than this; without recorders it is a poll.
LOOK_SECONDS = 0.05
SHORT_POLL_SECONDS = 1.0
# How often an engine without our extension is asked again whether it has it now.
REDETECT_SECONDS = 30.0

log = logging.getLogger("highwater.poller")


class PollObserver(Protocol):
    """Counts polls."""

    def polled(self, seconds: float) -> None:
        """One round is over."""

    def poll_failed(self, source: str, reason: str) -> None:
        """One source failed in it."""


@dataclass(slots=True)
class _Round:
    """The outcome of one poll."""

    observation: Observation = field(default_factory=Observation)
    records: tuple[RankRecord, ...] = ()
    progress: Progress | None = None
    missing: tuple[MissingRank, ...] = ()
    failure: EngineError | None = None
    contact: Contact = "answered"
    first_failure: str | None = None
    server_error: EngineRefused | None = None
    rested: bool = False
    is_another_loading: bool = False


class _Arrival(NamedTuple):
    """When a reading was taken, by the clocks of this machine: a rank's own may be set differently.

    Attributes:
        stamp: What its worker calls that moment.
        mono: Monotonic seconds.
        at: Unix seconds, as they were when it came.
    """

    stamp: float
    mono: float
    at: float


class Poller:
    """Polls the engine and keeps the last report.

    Args:
        engine: The engine.
        sources: Where readings come from, in the order in which they are asked.
        history: Where reports and state changes are kept.
        poll_seconds: Time between polls.
        idle_poll_seconds: Time between two questions to workers that need not be asked: of an idle engine, or of one
            whose recorders show the same.
        stale_seconds: The age from which a report is stale.
        engine_has_extension: The operator's word that our extension is loaded under another name.
        observer: Who counts polls.
        recorders: The workers' recorders, if they have any.
        lives: What is kept of the engine's lives.
        max_step_seconds: The longest step, or worker call, that may be in order.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        internal_error: Counts a fault of our own.

    Attributes:
        capabilities: What the engine can do.
        listeners: Called with each report.
        pace: Asked after each poll for the seconds until the next look, where that is to come sooner than the next
            poll. Such a look reads the recorders' files and nothing else; without recorders it is a poll, and comes
            after a second at the soonest.
    """

    def __init__(
        self,
        engine: Engine,
        sources: Sequence[Source],
        history: History,
        *,
        poll_seconds: float,
        stale_seconds: float,
        engine_has_extension: bool,
        observer: PollObserver,
        idle_poll_seconds: float = 5.0,
        recorders: Recorders | None = None,
        lives: Lives | None = None,
        max_step_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._internal_error = internal_error
        self.capabilities = Capabilities()
        self.listeners: list[Callable[[Report], None]] = []
        self.pace: Callable[[Report], float] | None = None
        self._engine = engine
        self._sources = sources
        self._history = history
        self._poll_seconds = poll_seconds
        self._idle_poll_seconds = idle_poll_seconds
        self._stale_seconds = stale_seconds
        self._engine_has_extension = engine_has_extension
        self._observer = observer
        self._recorders = recorders
        self._lives = lives or Lives()
        self._max_step_seconds = max_step_seconds
        self._clock = clock
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()
        self._detected_at: float | None = None
        self._verdict = EngineVerdict()
        self._state_since: float | None = None
        self._arrivals: dict[tuple[int, int], _Arrival] = {}
        self._work_done: float | None = None
        self._workers_asked_at: float | None = None
        self._public_capabilities: dict[str, Any] = {}
        self._last = Report(engine=EngineStatus(url=engine.url, state="starting", hint="not asked yet"))

    # --- what others ask ---

    def current(self) -> Report:
        """The last report, with its age as of now."""
        if self._last.taken_at is None:
            return self._last
        age = self._age_seconds()
        aged = replace(self._last, age_seconds=age)
        return _stale(aged) if aged.stale or age > self._stale_seconds else aged

    def _age_seconds(self) -> float:
        """Since the oldest reading of the last report was taken."""
        now = self._clock()
        return max((now - arrival.mono for arrival in self._arrivals.values()), default=0.0)

    @property
    def life(self) -> EngineLife:
        """The engine's present life."""
        return self._lives.present

    @property
    def baseline(self) -> tuple[RankReading, ...]:
        """The first readings after the engine became ready; empty before, and where they are not known."""
        return self._lives.present.baseline

    async def run(self) -> None:
        """Poll until cancelled, on a grid that a slow poll does not shift; in between look as often as is asked."""
        now = asyncio.get_running_loop().time  # what asyncio sleeps by
        next_at = now()
        while True:
            await self._guarded(partial(self.poll, spare_idle=True))
            missed = max(int((now() - next_at) // self._poll_seconds), 0)
            next_at += (missed + 1) * self._poll_seconds
            while (left := next_at - now()) > 0:
                pace, look = self._asked_pace()
                await asyncio.sleep(min(pace, left))
                if pace < left:
                    await self._guarded(look)

    async def _guarded(self, ask: Callable[[], Awaitable[object]]) -> None:
        try:
            await ask()
        except Exception:
            # The loop is the product: whatever one round met, the next must come. It is logged and counted.
            self._internal_error()
            log.exception("poll failed unexpectedly")
            self._observer.poll_failed("poller", "unexpected")

    def _asked_pace(self) -> tuple[float, Callable[[], Awaitable[object]]]:
        try:
            return self._next_look()
        except Exception:
            # As above: it is somebody else's answer, and polls come without it.
            self._internal_error()
            log.exception("the pace could not be asked for")
            self._observer.poll_failed("poller", "unexpected")
            return self._poll_seconds, self.look

    def _next_look(self) -> tuple[float, Callable[[], Awaitable[object]]]:
        """After how many seconds to look again, and how."""
        seconds = self._poll_seconds if self.pace is None else self.pace(self.current())
        if self._can_look():
            return max(seconds, LOOK_SECONDS), self.look
        return max(seconds, SHORT_POLL_SECONDS), partial(self.poll, spare_idle=True)

    def _can_look(self) -> bool:
        return STATES[self._verdict.state].is_up and self._is_recorded

    @property
    def _is_recorded(self) -> bool:
        """True if the recorders alone show every rank's memory."""
        return self._recorders is not None and is_complete(self._recorders.records, self._ranks_expected)

    async def look(self) -> Report:
        """Read the recorders' files, and nothing else; the engine's state stays as the last poll found it."""
        async with self._turn:
            outcome = _Round(rested=True)
            await self._look(outcome)
            ranks = self._heard(outcome)
            if ranks is not None:
                outcome.missing = self._last.ranks_missing
                self._last = self._fresh(self._last.engine, ranks, outcome)
                self._history.add(self._last)
            report = self.current()
        self._tell(report)
        return report

    def _tell(self, report: Report) -> None:
        for listener in self.listeners:
            listener(report)

    async def poll(self, *, spare_idle: bool = False) -> Report:
        """One round, now. Rounds asked for at the same time run one after the other.

        Args:
            spare_idle: Leave all but the API server alone if the engine has done nothing since they were last asked.
        """
        async with self._turn:
            started = time.monotonic()
            outcome = await self._ask(spare_idle=spare_idle)
            report = self._conclude(outcome)
            if self._lives.is_unsaved:
                await asyncio.to_thread(self._lives.save)
            self._observer.polled(time.monotonic() - started)
        self._tell(report)
        return report

    # --- asking ---

    async def _ask(self, *, spare_idle: bool) -> _Round:
        outcome, began = _Round(), self._clock()
        try:
            if self._must_detect():
                await self._detect()
            await self._begin_recorders()
        except EngineError as exc:
            self._observer.poll_failed("detection", exc.reason)
            outcome.failure, outcome.contact = exc, _contact(exc, wakes_engine=False)
            await self._look(outcome)
            return outcome
        available = [source for source in self._sources if source.available(self.capabilities)]
        await self._ask_each([source for source in available if not source.wakes_engine], outcome)
        await self._look(outcome, began=None if spare_idle or outcome.failure is not None else began)
        if outcome.failure is None:
            await self._wake([source for source in available if source.wakes_engine], outcome, spare_idle=spare_idle)
        if outcome.failure is None and not outcome.rested and outcome.observation == Observation():
            # The API server lives, and has nothing but errors of its own to say: what it speaks for may be dead.
            outcome.failure = outcome.server_error
            outcome.contact = "worker_call_late" if outcome.server_error is not None else outcome.contact
        return outcome

    async def _wake(self, waking: Sequence[Source], outcome: _Round, *, spare_idle: bool) -> None:
        """Ask those who do not answer for nothing."""
        spared = [source for source in waking if spare_idle and self._may_spare(source, outcome)]
        outcome.rested = bool(spared)
        asking = asyncio.create_task(self._ask_each([source for source in waking if source not in spared], outcome))
        try:
            while self._recorders is not None and not (await asyncio.wait({asking}, timeout=self._poll_seconds))[0]:
                await self._look(outcome)
                if outcome.progress is not None and outcome.progress.verdict == "stuck":
                    return  # no answer will come: the deadline need not pass before that is reported
            await asking
        finally:
            asking.cancel()
        if outcome.failure is not None:
            # Meanwhile a deadline has passed: a step that was not there before may be what held the answer up.
            await self._look(outcome)

    async def _look(self, outcome: _Round, *, began: float | None = None) -> None:
        """Read the recorders, which needs nobody's answer.

        Args:
            outcome: Gets what they say.
            began: Wait, for a little, for readings from after this moment, in monotonic seconds.
        """
        if self._recorders is None:
            return
        within = None if began is None else self._clock() - began
        outcome.records = await self._recorders.read(within_seconds=within)
        if outcome.contact == "refused":
            # Workers' files look alive for a little longer than they are.
            outcome.progress = None
            if self._verdict.state == "gone":
                outcome.is_another_loading = await self._recorders.is_another_writing(self.life.recorder_instance)
            return
        load = outcome.observation.load
        held = self._last.engine.traits.is_held or bool(load is not None and load.sleeping)
        outcome.progress = self._recorders.progress(outcome.records, load, held=held)

    async def _ask_each(self, sources: Sequence[Source], outcome: _Round) -> None:
        for source in sources:
            try:
                seen = await source.read()
            except EngineError as exc:
                self._observer.poll_failed(source.name, exc.reason)
                outcome.first_failure = outcome.first_failure or f"{source.name}: {exc}"
                if isinstance(exc, EngineRefused) and exc.status >= SERVER_ERROR:
                    outcome.server_error = exc
                if isinstance(exc, EngineUnreachable | EngineUnresponsive):
                    # Asking on would only add questions to a queue that does not move.
                    outcome.failure, outcome.contact = exc, _contact(exc, wakes_engine=source.wakes_engine)
                    return
            else:
                outcome.observation = _merge(outcome.observation, seen)

    def _may_spare(self, source: Source, outcome: _Round) -> bool:
        """Return whether this source need not be read: its answer is known, or would come too late."""
        if outcome.progress is not None and outcome.progress.verdict == "busy":
            return True  # the loop answers nobody before its step is over
        if workers_left(outcome.records, self._ranks_expected) is not None:
            return False  # the engine that these files are of has ended; who answers is another one, or half of it
        asked_at = self._workers_asked_at
        if asked_at is None or self._last.stale:
            return False
        # A little less than the time itself, or the poll that falls on it would be one poll late.
        if self._clock() - asked_at >= self._idle_poll_seconds - self._poll_seconds / 2:
            return False
        return self._is_at_rest(outcome.observation.load) or (
            source.name == Workers.name
            and outcome.progress is not None
            and outcome.progress.verdict in ("progressing", "idle")
            and is_complete(outcome.records, self._ranks_expected)
        )

    def _is_at_rest(self, load: EngineLoad | None) -> bool:
        """Return whether nothing ran since the workers were last called."""
        return load is not None and load.is_idle and load.work_done is not None and load.work_done == self._work_done

    def _must_detect(self) -> bool:
        if self._detected_at is None:
            return True
        return not self.capabilities.collective_rpc and self._clock() - self._detected_at >= REDETECT_SECONDS

    async def _detect(self) -> None:
        self.capabilities = await detect(self._engine, assume_extension=self._engine_has_extension)
        self._public_capabilities = self.capabilities.public()
        self._engine.rpc_allowed = self.capabilities.collective_rpc
        self._detected_at = self._clock()

    async def _begin_recorders(self) -> None:
        progress = self._last.progress
        if progress is not None and progress.verdict == "busy":
            return  # of those that run; the others would not hear of it before the step is over
        if self._recorders is None:
            return
        if not self.capabilities.collective_rpc:
            await self._recorders.adopt()
        elif self._recorders.must_begin():
            await self._recorders.begin()

    @property
    def _ranks_expected(self) -> int | None:
        """By the engine's configuration; by the recorders where the engine does not show that."""
        by_recorders = None if self._recorders is None else self._recorders.ranks_expected
        return self.capabilities.ranks_expected or by_recorders

    # --- concluding ---

    def _conclude(self, outcome: _Round) -> Report:
        was, seen, before = self._last, outcome.observation, self._verdict
        ranks = None if outcome.contact == "refused" else self._heard(outcome)
        self._verdict = verdict = self._decide(outcome)
        self._keep_life(outcome, ranks, before)
        outcome.missing = was.ranks_missing
        if ranks is not None:
            outcome.missing = missing_ranks(self.capabilities, ranks, outcome.records, was.ranks_missing, was.ranks)
        if verdict.since != before.since or self._state_since is None:
            self._state_since = self._wall_clock()
        status = self._status(seen.load or EngineLoad(), outcome)
        if ranks is None:
            # What was last known stays, with its age, and marked as stale where the engine did not confirm it.
            lost = was.stale or outcome.failure is not None
            expected = self._ranks_expected
            last = replace(was, engine=status, stale=lost, ranks_expected=expected, progress=outcome.progress)
            self._last = _stale(last) if lost else last
        else:
            self._last = self._fresh(status, ranks, outcome)
        if seen.workers is not None:
            self._work_done = seen.load.work_done if seen.load is not None else None
            self._workers_asked_at = self._clock()
        self._history.add(self._last)
        if before.state != verdict.state:
            self._history.record("state", f"engine {before.state} -> {verdict.state}" + _because(status.hint))
            log.info("engine %s -> %s%s", before.state, verdict.state, _because(status.hint))
        return self.current()

    def _decide(self, outcome: _Round) -> EngineVerdict:
        load, paused, is_answered = outcome.observation.load, outcome.observation.paused, outcome.failure is None
        seen = Seen(
            contact=outcome.contact,
            failure=None if outcome.failure is None else self._failure(outcome.failure),
            progress=outcome.progress,
            # Whoever answered in this round is not whose files say that all is over.
            workers=workers_left(outcome.records, self._ranks_expected)
            if outcome.observation.workers is None
            else None,
            is_another_loading=outcome.is_another_loading,
            sleeping=None if load is None else bool(load.sleeping),
            paused=False if paused is None and is_answered and not outcome.rested else paused,
        )
        return decide(self._verdict, seen, self._clock(), max_step_seconds=self._max_step_seconds)

    def _keep_life(self, outcome: _Round, ranks: tuple[RankReading, ...] | None, before: EngineVerdict) -> None:
        """Tell whose life this is; what belonged to another is forgotten."""
        if isinstance(outcome.failure, EngineUnreachable):
            # It may come back as another version with other options: it is asked again before its workers are.
            self._detect_again()
        if self._verdict.state == "gone" and before.state != "gone":
            self._lives.end()
            self._forget_engine()
        load = outcome.observation.load
        came_up = before.since is not None and (not before.has_answered or before.state == "gone")
        has_not_worked = load is not None and load.work_done == 0
        if ranks:
            # Whoever replaced an engine that was there a moment ago has not worked for long.
            was_there = bool(self._last.ranks) and not self.current().stale
            if self._lives.hear(ranks, is_watched=came_up or has_not_worked or was_there):
                self._forget_engine()
        elif STATES[self._verdict.state].is_up and not self.capabilities.collective_rpc:
            self._lives.came_back()
        if ranks and self._verdict.state == "ready":
            self._lives.settle(ranks)
        if self._recorders is not None and self._recorders.recorder.instance is not None:
            self._lives.follow(self._recorders.recorder.instance)

    def _heard(self, outcome: _Round) -> tuple[RankReading, ...] | None:
        """Every rank's best reading, in the ranks' order; ``None`` where nobody was heard of."""
        # Who was left alone has not gone: what these workers answered last still holds.
        holds = outcome.rested and self._workers_asked_at is not None
        return best_readings(
            tuple(map(account, outcome.observation.workers or ())),
            outcome.records,
            kept=tuple(rank for rank in self._last.ranks if rank.source == "rpc") if holds else (),
            fuller_for_seconds=self._idle_poll_seconds,
        )

    def _fresh(self, status: EngineStatus, ranks: tuple[RankReading, ...], outcome: _Round) -> Report:
        ages = {rank_key(record.identity): record.reading_age_seconds or 0.0 for record in outcome.records}
        arrivals = ((rank_key(rank), self._arrival(rank, ages.get(rank_key(rank), 0.0))) for rank in ranks)
        self._arrivals = dict(arrivals)
        now = self._clock()
        ranks = tuple(replace(rank, age_seconds=max(now - self._arrivals[rank_key(rank)].mono, 0.0)) for rank in ranks)
        return Report(
            taken_at=min((arrival.at for arrival in self._arrivals.values()), default=self._wall_clock()),
            age_seconds=self._age_seconds(),
            stale=False,
            engine=status,
            ranks_expected=self._ranks_expected,
            ranks_reported=len(ranks),
            ranks=ranks,
            ranks_missing=outcome.missing,
            progress=outcome.progress,
            encoder_cache=encoder_totals(ranks),
            growth=self._growth(ranks),
        )

    def _arrival(self, rank: RankReading, recorded_seconds_ago: float) -> _Arrival:
        """When a reading was taken: an answer as it came, a record as long ago as its writer's clock says."""
        known = self._arrivals.get(rank_key(rank))
        if known is not None and known.stamp == rank.taken_at:
            return known
        ago = recorded_seconds_ago if rank.source == "recorder" else 0.0
        return _Arrival(rank.taken_at, self._clock() - ago, self._wall_clock() - ago)

    def _growth(self, ranks: tuple[RankReading, ...]) -> Growth:
        used, by_rank = (
            self._history.recent_used(GROWTH_SECONDS),
            self._history.recent_used_by_rank(GROWTH_SECONDS),
        )
        grown = growth(self.baseline, ranks, used, by_rank)
        return replace(grown, reason=self.life.baseline_problem)

    def _detect_again(self) -> None:
        self._detected_at = None
        self._engine.rpc_allowed = False

    def _forget_engine(self) -> None:
        """Drop the call under way and what was detected: they belong to an engine that has ended."""
        self._engine.forget_call()
        self._detect_again()
        self._workers_asked_at = None
        if self._recorders is not None:
            self._recorders.forget()

    def _status(self, load: EngineLoad, outcome: _Round) -> EngineStatus:
        return EngineStatus(
            url=self._engine.url,
            state=self._verdict.state,
            since=self._state_since,
            started_at=self.life.started_at,
            restarts=self.life.restarts,
            version=self.capabilities.version,
            model=self.capabilities.model,
            requests_running=load.requests_running,
            requests_waiting=load.requests_waiting,
            kv_cache_usage_ratio=load.kv_cache_usage_ratio,
            work_done=load.work_done,
            capabilities=self._public_capabilities,
            hint=self._hint(outcome),
        )

    def _failure(self, failure: EngineError) -> str:
        known = self._verdict.has_answered or bool(self.life.processes)
        return failure_text(failure, self._engine.url, is_up=STATES[self._verdict.state].is_up, was_there=known)

    def _hint(self, outcome: _Round) -> str | None:
        if self._verdict.reason is not None:
            return self._verdict.reason
        # Who only watches has set up all that this takes.
        setup = None if self._is_recorded else setup_hint(self.capabilities)
        problem = None if self._recorders is None else self._recorders.problem
        if setup is not None or outcome.first_failure is not None:
            return "; ".join(text for text in (problem, setup) if text) or outcome.first_failure
        if outcome.missing:
            known = None if self._recorders is None else problem or ""
            return missing_hint(outcome.missing, self._ranks_expected or 0, known)
        return problem


def _stale(report: Report) -> Report:
    return replace(report, stale=True, growth=without_forecast(report.growth))


def _merge(first: Observation, second: Observation) -> Observation:
    return Observation(
        workers=second.workers if second.workers is not None else first.workers,
        load=second.load or first.load,
        paused=second.paused if second.paused is not None else first.paused,
    )


def _contact(failure: EngineError, *, wakes_engine: bool) -> Contact:
    """How far a round came.

    Args:
        failure: What ended it.
        wakes_engine: Whether it was a question that the API server hands on to the engine.
    """
    if isinstance(failure, EngineNotListening):
        return "refused"
    if isinstance(failure, EngineUnresponsive | EngineRefused):
        return "worker_call_late" if wakes_engine else "late"
    return "broken"


def _because(hint: str | None) -> str:
    return f": {hint}" if hint else ""
