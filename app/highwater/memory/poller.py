"""The loop: read the recorders, ask what is left to ask, account for what was said, keep the report. Decides nothing.

Polls never overlap, keep to a grid without jitter, and never repeat a worker call that has not come back. Where every
rank has a recorder no worker is called to watch it (``due`` says what is asked when): vLLM's multiprocess workers spin
on a core for a second after each call (vllm/distributed/device_communicators/shm_broadcast.py, ``SpinCondition``), so
that a call a second keeps a core busy for each rank.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from highwater.accounting.attribution import account, encoder_totals, growth, without_forecast
from highwater.engine.capabilities import Capabilities, detect
from highwater.engine.client import Engine
from highwater.engine.hints import failure_text, loading_text, missing_hint, setup_hint
from highwater.engine.life import EngineLife, Lives
from highwater.engine.verdict import Contact, EngineVerdict, Seen, decide
from highwater.errors import EngineError, EngineNotListening, EngineRefused, EngineUnreachable, EngineUnresponsive
from highwater.memory.arrivals import Arrivals
from highwater.memory.due import Situation, is_due
from highwater.memory.history import History
from highwater.memory.ranks import Sizes, best_readings, is_complete, missing_ranks, workers_left
from highwater.memory.sources import Observation, Reach, Source
from highwater.memory.start_failure import start_failure
from highwater.readings import (
    STATES,
    EngineLoad,
    EngineStatus,
    Growth,
    MissingRank,
    Progress,
    RankReading,
    Report,
    StartFailure,
)
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
    """What one round of questions brought.

    Attributes:
        asked: So many questions were asked; ``answered``: so many of them had a good answer.
        rested: Whether the engine or its workers were left alone.
        is_loading: Whether the workers' recorders write though the API server does not answer yet.
        is_another_loading: Whether recorders write that are not of the engine that was known last.
    """

    observation: Observation = field(default_factory=Observation)
    records: tuple[RankRecord, ...] = ()
    progress: Progress | None = None
    missing: tuple[MissingRank, ...] = ()
    failure: EngineError | None = None
    contact: Contact = "answered"
    first_failure: str | None = None
    server_error: EngineRefused | None = None
    asked: int = 0
    answered: int = 0
    rested: bool = False
    is_loading: bool = False
    is_another_loading: bool = False


class Poller:
    """Polls the engine and keeps the last report.

    Args:
        engine: The engine.
        sources: Where readings come from, in the order in which they are asked.
        history: Where reports and state changes are kept.
        poll_seconds: Time between polls.
        idle_poll_seconds: Time between two questions to the workers of an engine at rest that have no recorders.
        stale_seconds: The age from which a report is stale.
        engine_has_extension: The operator's word that our extension is loaded under another name.
        observer: Who counts polls.
        recorders: The workers' recorders, if they have any.
        requests_under_way: How many requests are under way through this sidecar.
        lives: What is kept of the engine's lives.
        max_step_seconds: The longest step, or worker call, that may be in order.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        internal_error: Counts a fault of our own.

    Attributes:
        capabilities: What the engine can do.
        metrics_text: Its last ``/metrics`` page.
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
        requests_under_way: Callable[[], int] = lambda: 0,
        lives: Lives | None = None,
        max_step_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._internal_error = internal_error
        self.capabilities = Capabilities()
        self.metrics_text = ""
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
        self._requests_under_way = requests_under_way
        self._lives = lives or Lives()
        self._max_step_seconds = max_step_seconds
        self._clock = clock
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()
        self._detected_at: float | None = None
        self._verdict = EngineVerdict()
        self._state_since: float | None = None
        self._up_since: float | None = None
        self._arrivals = Arrivals(clock, wall_clock)
        # What this engine was asked, by the sources' names, and what it said that still counts where it is not asked.
        self._detected = Capabilities()
        self._answered_at: dict[str, float] = {}
        self._load: EngineLoad | None = None
        self._work_done: float | None = None
        self._is_last_answered = False
        # The calls that the workers' recorders have counted, and when the count moved last.
        self._calls: tuple[tuple[int, int], ...] = ()
        self._called_at = float("-inf")
        self._start_failure: StartFailure | None = None
        self._public_capabilities: dict[str, Any] = {}
        self._last = Report(engine=EngineStatus(url=engine.url, state="starting", hint="not asked yet"))

    # --- what others ask ---

    def current(self) -> Report:
        """The last report, with its age as of now."""
        if self._last.taken_at is None:
            return self._last
        age = self._arrivals.age_seconds
        aged = replace(self._last, age_seconds=age)
        return _stale(aged) if aged.stale or age > self._stale_seconds else aged

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
        """Whether the recorders alone tell how much memory every rank has."""
        recorders = self._recorders
        return recorders is not None and recorders.are_followed and is_complete(recorders.records, self._ranks_expected)

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
            spare_idle: Ask only what is due; else everybody, workers included.
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
        except EngineError as exc:
            self._observer.poll_failed("detection", exc.reason)
            outcome.failure, outcome.contact = exc, _contact(exc, "api_server")
            await self._follow_start()
            await self._look(outcome)
            return outcome
        await self._begin_recorders()
        await self._look(outcome)
        available = [source for source in self._sources if source.available(self.capabilities)]
        direct = [source for source in available if source.reach == "api_server"]
        if await self._ask_due(direct, outcome, spare_idle=spare_idle):
            outcome.observation = replace(outcome.observation, load=self._load)
        if outcome.failure is not None or not spare_idle:
            await self._look(outcome, began=None if outcome.failure is not None else began)
        else:
            self._judge(outcome)
        if outcome.failure is None:
            waking = [source for source in available if source.reach != "api_server"]
            await self._wake(waking, outcome, spare_idle=spare_idle)
        if outcome.failure is None and outcome.asked and not outcome.answered:
            # The API server lives, and has nothing but errors of its own to say: what it speaks for may be dead.
            outcome.failure = outcome.server_error
            outcome.contact = "worker_call_late" if outcome.server_error is not None else outcome.contact
        return outcome

    async def _wake(self, waking: Sequence[Source], outcome: _Round, *, spare_idle: bool) -> None:
        """Ask those who do not answer for nothing."""

        async def ask() -> None:
            outcome.rested = await self._ask_due(waking, outcome, spare_idle=spare_idle)

        asking = asyncio.create_task(ask())
        try:
            while self._recorders is not None and not (await asyncio.wait({asking}, timeout=self._poll_seconds))[0]:
                await self._look(outcome)
                if outcome.progress is not None and outcome.progress.verdict == "stuck":
                    return  # nobody will answer: the deadline need not pass before that is told
            await asking
        finally:
            asking.cancel()
        if outcome.failure is not None:
            # Meanwhile a deadline has passed: a step that was not there before may be what held the answer up.
            await self._look(outcome)

    async def _ask_due(self, sources: Sequence[Source], outcome: _Round, *, spare_idle: bool) -> bool:
        """Ask those of which it is time, and return whether any was left alone."""
        situation = self._situation(outcome)
        due = [source for source in sources if not spare_idle or self._is_due(source, situation)]
        await self._ask_each(due, outcome)
        return len(due) < len(sources)

    def _is_due(self, source: Source, situation: Situation) -> bool:
        answered_at = self._answered_at.get(source.name)
        return is_due(
            source.reach,
            situation,
            None if answered_at is None else self._clock() - answered_at,
            idle_poll_seconds=self._idle_poll_seconds,
            slack=self._poll_seconds / 2,
        )

    def _situation(self, outcome: _Round) -> Situation:
        load = outcome.observation.load
        counted = load or self._load or EngineLoad()
        has_ended = workers_left(outcome.records, self._ranks_expected) is not None
        return Situation(
            is_recorded=self._is_recorded,
            verdict=None if outcome.progress is None else outcome.progress.verdict,
            still_seconds=self._clock() - self._called_at,
            has_requests=bool(counted.requests_running or counted.requests_waiting or self._requests_under_way()),
            is_held=self._last.engine.traits.is_held,
            is_at_rest=self._is_at_rest(load),
            is_sure=self._is_last_answered and not self._last.stale and not has_ended,
        )

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
        self._count_calls(outcome.records)
        self._hear_of_rpc()
        if outcome.failure is not None and STATES[self._verdict.state].is_absent:
            outcome.is_loading = self._recorders.are_alive
            outcome.is_another_loading = outcome.is_loading or (
                self._verdict.state == "gone" and await self._recorders.is_another_writing(self.life.recorder_instance)
            )
        self._judge(outcome)

    def _judge(self, outcome: _Round) -> None:
        """Conclude from the recorders, and from what the engine is known to be asked for, whether the ranks move."""
        if self._recorders is None:
            return
        if outcome.contact == "refused":
            # Workers' files look alive for a little longer than they are.
            outcome.progress = None
            return
        load = outcome.observation.load or self._load
        held = self._last.engine.traits.is_held or bool(load is not None and load.sleeping)
        outcome.progress = self._recorders.progress(outcome.records, load, held=held)

    def _count_calls(self, records: Sequence[RankRecord]) -> None:
        calls = tuple((record.identity.pid, record.progress.calls) for record in records if record.progress is not None)
        if calls != self._calls:
            self._calls, self._called_at = calls, self._clock()

    async def _ask_each(self, sources: Sequence[Source], outcome: _Round) -> None:
        for source in sources:
            outcome.asked += 1
            try:
                seen = await source.read()
            except EngineError as exc:
                self._observer.poll_failed(source.name, exc.reason)
                outcome.first_failure = outcome.first_failure or f"{source.name}: {exc}"
                if isinstance(exc, EngineRefused) and exc.status >= SERVER_ERROR:
                    outcome.server_error = exc
                if isinstance(exc, EngineUnreachable | EngineUnresponsive):
                    # Asking on would only add questions to a queue that does not move.
                    outcome.failure, outcome.contact = exc, _contact(exc, source.reach)
                    return
            else:
                outcome.answered += 1
                self._answered_at[source.name] = self._clock()
                outcome.observation = _merge(outcome.observation, seen)

    def _is_at_rest(self, load: EngineLoad | None) -> bool:
        """Whether nothing ran since the workers were last asked."""
        return load is not None and load.is_idle and load.work_done is not None and load.work_done == self._work_done

    def _must_detect(self) -> bool:
        if self._detected_at is None:
            return True
        is_settled = self.capabilities.collective_rpc or self._is_recorded
        return not is_settled and self._clock() - self._detected_at >= REDETECT_SECONDS

    async def _detect(self) -> None:
        self._detected = await detect(self._engine, assume_extension=self._engine_has_extension)
        self._detected_at = self._clock()
        self._allow_rpc(self._detected)

    def _hear_of_rpc(self) -> None:
        """Allow worker calls once every worker's recorder says that it has our operations; as long as it lives."""
        if self._detected_at is None or self.capabilities.collective_rpc or self._recorders is None:
            return
        told = self._detected.with_recorders_word(offer_rpc=self._recorders.offer_rpc)
        if told.collective_rpc:
            self._allow_rpc(told)

    def _allow_rpc(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._public_capabilities = capabilities.public()
        self._engine.rpc_allowed = capabilities.collective_rpc

    async def _begin_recorders(self) -> None:
        """Follow recorders that run already; start those that do not, where workers can be called."""
        progress = self._last.progress
        if progress is not None and progress.verdict == "busy":
            return  # of those that run; the others would not hear of it before the step is over
        if self._recorders is None:
            return
        can_start = self.capabilities.collective_rpc
        await self._recorders.adopt(self_started=can_start)
        if self._is_recorded:
            self._recorders.settle()
        elif can_start and self._recorders.must_begin():
            await self._recorders.begin()

    async def _follow_start(self) -> None:
        """Follow the recorders of an engine that loads: they write long before its API server listens."""
        if self._recorders is None or not STATES[self._verdict.state].is_absent:
            return
        records = self._recorders.records
        if self._recorders.are_followed and workers_left(records, len(records)) is not None:
            failure = start_failure(records, self._wall_clock())
            if failure is not None:
                self._start_failure = failure
                self._history.record("state", failure.summary)
                log.warning("%s", failure.summary)
            self._lives.end()
            self._recorders.forget()
        await self._recorders.adopt(former=self.life.recorder_instance, self_started=True)

    @property
    def _ranks_expected(self) -> int | None:
        """By the engine's configuration; by the recorders where the engine does not show that, or not yet."""
        by_recorders = None if self._recorders is None else self._recorders.ranks_expected
        by_engine = self.capabilities.ranks_expected if self._detected_at is not None else None
        return by_engine or by_recorders or self.capabilities.ranks_expected

    # --- concluding ---

    def _conclude(self, outcome: _Round) -> Report:
        was, seen, before = self._last, outcome.observation, self._verdict
        is_lost = outcome.contact == "refused" and not outcome.is_loading
        ranks = None if is_lost else self._heard(outcome)
        self._verdict = verdict = self._decide(outcome)
        self._keep_times(outcome)
        self._keep_life(outcome, ranks, before)
        if seen.metrics_text is not None:
            self.metrics_text = seen.metrics_text
        outcome.missing = was.ranks_missing
        if ranks is not None:
            outcome.missing = self._missing(ranks, outcome)
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
        self._last = replace(self._last, start_failure=self._start_failure)
        if seen.workers is not None:
            self._work_done = seen.load.work_done if seen.load is not None else None
        self._history.add(self._last)
        if before.state != verdict.state:
            self._history.record("state", f"engine {before.state} -> {verdict.state}" + _because(status.hint))
            log.info("engine %s -> %s%s", before.state, verdict.state, _because(status.hint))
        return self.current()

    def _keep_times(self, outcome: _Round) -> None:
        self._is_last_answered = outcome.failure is None
        self._load = outcome.observation.load
        if STATES[self._verdict.state].is_absent:
            self._up_since = None
        elif self._up_since is None:
            self._up_since, self._start_failure = self._clock(), None

    def _missing(self, ranks: Sequence[RankReading], outcome: _Round) -> tuple[MissingRank, ...]:
        if outcome.is_loading:
            return ()  # they come one after the other
        sizes = Sizes.of(self.capabilities) or Sizes.recorded(outcome.records)
        was = self._last
        return missing_ranks(sizes, ranks, outcome.records, was.ranks_missing, was.ranks)

    def _decide(self, outcome: _Round) -> EngineVerdict:
        load, paused, is_answered = outcome.observation.load, outcome.observation.paused, outcome.failure is None
        seen = Seen(
            contact=outcome.contact,
            failure=None if outcome.failure is None else self._failure(outcome.failure, outcome),
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
            is_watched = came_up or has_not_worked or was_there or outcome.is_loading
            if self._lives.hear(ranks, is_watched=is_watched):
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
        holds = outcome.rested and "workers" in self._answered_at
        return best_readings(
            tuple(map(account, outcome.observation.workers or ())),
            outcome.records,
            kept=tuple(rank for rank in self._last.ranks if rank.source == "rpc") if holds else (),
            fuller_for_seconds=self._idle_poll_seconds,
        )

    def _fresh(self, status: EngineStatus, ranks: tuple[RankReading, ...], outcome: _Round) -> Report:
        ranks = self._arrivals.dated(ranks, outcome.records)
        return Report(
            taken_at=self._arrivals.taken_at,
            age_seconds=self._arrivals.age_seconds,
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

    def _growth(self, ranks: tuple[RankReading, ...]) -> Growth:
        # What an engine takes while it loads says nothing of how it fills.
        seconds = 0.0 if self._up_since is None else min(self._clock() - self._up_since, GROWTH_SECONDS)
        used, by_rank = self._history.recent_used(seconds), self._history.recent_used_by_rank(seconds)
        grown = replace(growth(self.baseline, ranks, used, by_rank), reason=self.life.baseline_problem)
        return grown if self._up_since is not None else without_forecast(grown)

    def _detect_again(self) -> None:
        self._detected_at = None
        self._engine.rpc_allowed = False

    def _forget_engine(self) -> None:
        """What was asked of one engine says nothing about the next, and its answers will not come."""
        self._engine.forget_call()
        self._detect_again()
        self._answered_at.clear()
        self._load = None
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

    def _failure(self, failure: EngineError, outcome: _Round) -> str:
        if outcome.is_loading:
            starts = [record.table.start for record in outcome.records if record.table is not None]
            return loading_text(min(starts, key=len, default=()), self._engine.url)
        known = self._verdict.has_answered or bool(self.life.processes)
        return failure_text(failure, self._engine.url, is_up=STATES[self._verdict.state].is_up, was_there=known)

    def _hint(self, outcome: _Round) -> str | None:
        if self._verdict.reason is not None:
            return self._verdict.reason
        recorders = self._recorders
        # Whoever only watches has set up all that this takes; what is wrong then is that ranks are missing.
        is_watched = self._is_recorded or (outcome.missing and recorders is not None and recorders.are_alive)
        setup = None if is_watched else setup_hint(self.capabilities)
        problem = None if recorders is None else recorders.problem
        if setup is not None or outcome.first_failure is not None:
            return "; ".join(text for text in (problem, setup) if text) or outcome.first_failure
        if outcome.missing:
            known = None if recorders is None else problem or ""
            return missing_hint(outcome.missing, self._ranks_expected or 0, known)
        return problem


def _stale(report: Report) -> Report:
    return replace(report, stale=True, growth=without_forecast(report.growth))


def _merge(first: Observation, second: Observation) -> Observation:
    return Observation(
        workers=second.workers if second.workers is not None else first.workers,
        load=second.load or first.load,
        metrics_text=second.metrics_text if second.metrics_text is not None else first.metrics_text,
        paused=second.paused if second.paused is not None else first.paused,
    )


def _contact(failure: EngineError, reach: Reach) -> Contact:
    """How far a round came.

    Args:
        failure: What ended it.
        reach: Who had to answer.
    """
    if isinstance(failure, EngineNotListening):
        return "refused"
    if isinstance(failure, EngineUnresponsive | EngineRefused):
        return "late" if reach == "api_server" else "worker_call_late"
    return "broken"


def _because(hint: str | None) -> str:
    return f": {hint}" if hint else ""
