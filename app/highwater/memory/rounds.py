"""Makes the requests of one poll: reads the recorders' files, then asks the engine for the rest. It concludes nothing.

It keeps what the engine offers (``Capabilities``), when each source responded, and which recorders are followed;
``due`` decides which requests are made. A source that fails costs only itself; an engine that does not respond ends
the round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from highwater.engine.capabilities import Capabilities, detect
from highwater.engine.client import Engine
from highwater.engine.verdict import Contact
from highwater.errors import EngineError, EngineNotListening, EngineRefused, EngineUnreachable, EngineUnresponsive
from highwater.memory.due import Situation, is_due
from highwater.memory.ranks import workers_left
from highwater.memory.sources import Observation, Reach, Source
from highwater.memory.sources.health import Health
from highwater.memory.start_failure import is_up_by_recorder, start_failure
from highwater.readings import STATES, EngineLoad, EngineState, Progress, Report, StartFailure
from highwater.recorder.coverage import Coverage
from highwater.recorder.rank import RankRecord
from highwater.recorder.recorders import Recorders

SERVER_ERROR = 500
# How often an engine without our extension is asked again whether it has it now.
REDETECT_SECONDS = 30.0


class PollObserver(Protocol):
    """Counts polls."""

    def polled(self, seconds: float) -> None:
        """One round is over."""

    def poll_failed(self, source: str, reason: str) -> None:
        """One source failed in it."""


@dataclass(frozen=True, slots=True)
class Before:
    """The outcome of the polls before this one.

    Attributes:
        state: The engine's state.
        report: The last report.
        recorder_instance: The name of the recorders of the engine's present life, or of its last one.
    """

    state: EngineState
    report: Report
    recorder_instance: str | None


@dataclass(slots=True)
class Round:
    """The outcome of one poll's requests.

    Attributes:
        before: The outcome of the polls before it.
        observation: What the sources returned; of one that was not asked, what still holds.
        records: The recorders' last records.
        progress: Whether the ranks make progress; ``None`` where that is unknown.
        failure: What ended the round; ``contact``: how far it came.
        first_failure: The first source that failed, and why, in words; ``failed``: the names of all that did.
        server_error: The API server's own error, where one was its answer.
        asked: The number of requests made; ``answered``: the number of them with a good response.
        rested: Whether the engine or its workers were left alone.
        is_loading: Whether the workers' recorders write though the API server does not answer yet.
        is_another_loading: Whether recorders write that are not of the engine that was known last.
        start_failure: How a start that was followed failed.
        has_start_ended: Whether a start that was followed is over, failed or not.
    """

    before: Before
    observation: Observation = field(default_factory=Observation)
    records: tuple[RankRecord, ...] = ()
    progress: Progress | None = None
    failure: EngineError | None = None
    contact: Contact = "answered"
    first_failure: str | None = None
    failed: set[str] = field(default_factory=set)
    server_error: EngineRefused | None = None
    asked: int = 0
    answered: int = 0
    rested: bool = False
    is_loading: bool = False
    is_another_loading: bool = False
    start_failure: StartFailure | None = None
    has_start_ended: bool = False


class Rounds:
    """Asks one engine.

    Args:
        engine: The engine.
        sources: Where readings come from, in the order in which they are asked.
        recorders: The workers' recorders, if they have any.
        requests_under_way: How many requests are under way through this sidecar.
        engine_has_extension: The operator's word that our extension is loaded under another name.
        poll_seconds: Time between rounds.
        idle_poll_seconds: Time between two questions to the workers of an engine at rest that have no recorders.
        observer: Counts failures.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.

    Attributes:
        capabilities: What the engine can do.
        public_capabilities: The same as ``GET /memory`` shows it.
        poll_seconds: As given.
    """

    def __init__(
        self,
        engine: Engine,
        sources: Sequence[Source],
        recorders: Recorders | None,
        *,
        requests_under_way: Callable[[], int],
        engine_has_extension: bool,
        poll_seconds: float,
        idle_poll_seconds: float,
        observer: PollObserver,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.capabilities = Capabilities()
        self.public_capabilities: dict[str, Any] = {}
        self.poll_seconds = poll_seconds
        self._engine = engine
        self._sources = sources
        self._health = Health(engine)
        self._recorders = recorders
        self._requests_under_way = requests_under_way
        self._engine_has_extension = engine_has_extension
        self._idle_poll_seconds = idle_poll_seconds
        self._observer = observer
        self._clock = clock
        self._wall_clock = wall_clock
        self._detected = Capabilities()
        self._detected_at: float | None = None
        # By the sources' names; and what they said that still holds where they are not asked.
        self._answered_at: dict[str, float] = {}
        self._failed: set[str] = set()  # in the last round
        self._load: EngineLoad | None = None
        self._work_done: float | None = None
        self._is_last_answered = False
        # When the engine's loop answered a question last, and since when it has left one unanswered.
        self._loop_answered_at: float | None = None
        self._loop_silent_since: float | None = None
        # The calls that the workers' recorders have counted, and when the count moved last.
        self._calls: tuple[tuple[int, int], ...] = ()
        self._called_at = float("-inf")

    # --- what is known ---

    @property
    def coverage(self) -> Coverage:
        """How much of the engine its recorders show."""
        return Coverage() if self._recorders is None else self._recorders.coverage(self.ranks_expected)

    @property
    def have_workers_answered(self) -> bool:
        """True if the workers of this engine have responded to a call for their memory."""
        return "workers" in self._answered_at

    @property
    def ranks_expected(self) -> int | None:
        """By the engine's configuration; by the recorders where the engine does not show that, or not yet."""
        by_recorders = None if self._recorders is None else self._recorders.ranks_expected
        by_engine = self.capabilities.ranks_expected if self._detected_at is not None else None
        return by_engine or by_recorders or self.capabilities.ranks_expected

    @property
    def model(self) -> str | None:
        """The model's name by the engine's configuration; by the recorders where the engine does not show that."""
        by_recorders = self._recorders.model if self._recorders is not None and self._recorders.are_followed else None
        return self.capabilities.model or by_recorders

    def detect_again(self) -> None:
        """Detect the engine again before its workers are called: it may be another version with other options."""
        self._detected_at = None
        self._engine.rpc_allowed = False

    def forget_engine(self) -> None:
        """Drop the call under way and everything detected: they belong to an engine that has ended."""
        self._engine.forget_call()
        self._engine.has_rpc_failed = False
        self.detect_again()
        self._answered_at.clear()
        self._loop_answered_at = self._loop_silent_since = None
        self._load = None
        if self._recorders is not None:
            self._recorders.forget()

    # --- asking ---

    async def ask(self, before: Before, *, spare_idle: bool) -> Round:
        """Ask what is due, or everybody.

        Args:
            before: The outcome of the polls before this one.
            spare_idle: Ask only what is due; else everybody, workers included.
        """
        outcome = Round(before)
        await self._ask_all(outcome, spare_idle=spare_idle)
        self._failed = outcome.failed
        self._is_last_answered = outcome.failure is None and not outcome.failed
        self._load = outcome.observation.load
        if outcome.observation.workers is not None:
            self._work_done = self._load.work_done if self._load is not None else None
        return outcome

    async def look(self, before: Before) -> Round:
        """Read the recorders' files, and nothing else."""
        outcome = Round(before, rested=True)
        await self._look(outcome)
        return outcome

    async def _ask_all(self, outcome: Round, *, spare_idle: bool) -> None:
        began = self._clock()
        try:
            if self._must_detect():
                await self._detect()
        except EngineError as exc:
            self._observer.poll_failed("detection", exc.reason)
            outcome.failure, outcome.contact = exc, _contact(exc, "api_server")
            await self._follow_start(outcome)
            await self._look(outcome)
            return
        await self._begin_recorders(outcome)
        await self._look(outcome)
        available = [source for source in self._sources if source.available(self.capabilities)]
        direct = [source for source in available if source.reach == "api_server"]
        due = self._due(direct, outcome, spare_idle=spare_idle)
        is_left_alone = len(due) < len(direct)
        if is_left_alone:
            # It still holds, if the server is there.
            outcome.observation = replace(outcome.observation, load=self._load)
        if is_left_alone or self._health.name in self._failed:
            due.append(self._health)
        await self._ask_each(due, outcome)
        if outcome.failure is not None or not spare_idle:
            await self._look(outcome, began=None if outcome.failure is not None else began)
        else:
            self._judge(outcome)
        if outcome.failure is None:
            waking = [source for source in available if source.reach != "api_server"]
            due = self._due(waking, outcome, spare_idle=spare_idle)
            outcome.rested = len(due) < len(waking)
            await self._wake(due, outcome)
        if outcome.failure is None and outcome.asked and not outcome.answered:
            # The API server lives, and has nothing but errors of its own to say: what it speaks for may be dead.
            outcome.failure = outcome.server_error
            outcome.contact = "worker_call_late" if outcome.server_error is not None else outcome.contact

    async def _wake(self, waking: Sequence[Source], outcome: Round) -> None:
        """Ask the sources that cost more than the API server."""
        asking = asyncio.create_task(self._ask_each(waking, outcome))
        try:
            while self._recorders is not None and not (await asyncio.wait({asking}, timeout=self.poll_seconds))[0]:
                await self._look(outcome)
                if outcome.progress is not None and outcome.progress.verdict == "stuck":
                    return  # no response will come: the deadline need not pass before that is reported
            await asking
        finally:
            asking.cancel()
        if outcome.failure is not None:
            # Meanwhile a deadline has passed: a step that was not there before may be what held the answer up.
            await self._look(outcome)
        else:
            self._judge(outcome)  # an answer excuses the loop

    def _due(self, sources: Sequence[Source], outcome: Round, *, spare_idle: bool) -> list[Source]:
        """Return those of which it is time."""
        situation = self._situation(outcome)
        return [source for source in sources if not spare_idle or self._is_due(source, situation)]

    def _is_due(self, source: Source, situation: Situation) -> bool:
        return is_due(
            source.reach,
            situation,
            self._since(self._answered_at.get(source.name)),
            idle_poll_seconds=self._idle_poll_seconds,
            slack=self.poll_seconds / 2,
        )

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else self._clock() - moment

    def _situation(self, outcome: Round) -> Situation:
        load = outcome.observation.load
        counted = load or self._load or EngineLoad()
        has_ended = workers_left(outcome.records, self.ranks_expected) is not None
        return Situation(
            is_recorded=self.coverage.is_complete,
            verdict=None if outcome.progress is None else outcome.progress.verdict,
            still_seconds=self._clock() - self._called_at,
            has_requests=bool(counted.requests_running or counted.requests_waiting or self._requests_under_way()),
            is_held=outcome.before.report.engine.traits.is_held,
            is_at_rest=self._is_at_rest(load),
            is_unanswered=self._loop_silent_since is not None,
            is_sure=self._is_last_answered and not outcome.before.report.stale and not has_ended,
        )

    async def _look(self, outcome: Round, *, began: float | None = None) -> None:
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
        if outcome.failure is not None and STATES[outcome.before.state].is_absent:
            # An API server that listens and does not answer has not that excuse once every worker is up.
            is_up = outcome.contact != "refused" and all(map(is_up_by_recorder, outcome.records))
            outcome.is_loading = self._recorders.are_alive and not is_up
            outcome.is_another_loading = outcome.is_loading or (
                outcome.before.state == "gone"
                and await self._recorders.is_another_writing(outcome.before.recorder_instance)
            )
        self._judge(outcome)

    def _judge(self, outcome: Round) -> None:
        """Conclude from the recorders, and from what the engine is known to be asked for, whether the ranks move."""
        if self._recorders is None:
            return
        if outcome.contact == "refused":
            # Workers' files look alive for a little longer than they are.
            outcome.progress = None
            return
        load = outcome.observation.load or self._load
        held = outcome.before.report.engine.traits.is_held or bool(load is not None and load.sleeping)
        outcome.progress = self._recorders.progress(
            outcome.records,
            load,
            proxied_requests=self._requests_under_way(),
            held=held,
            loop_silent_seconds=self._since(self._loop_silent_since),
            loop_answer_age_seconds=self._since(self._loop_answered_at),
        )

    def _count_calls(self, records: Sequence[RankRecord]) -> None:
        calls = tuple((record.identity.pid, record.progress.calls) for record in records if record.progress is not None)
        if calls != self._calls:
            self._calls, self._called_at = calls, self._clock()
            self._loop_silent_since = None

    async def _ask_each(self, sources: Sequence[Source], outcome: Round) -> None:
        for source in sources:
            outcome.asked += 1
            asked_at = self._clock()
            try:
                seen = await source.read()
            except EngineError as exc:
                self._observer.poll_failed(source.name, exc.reason)
                outcome.failed.add(source.name)
                if source.reach == "engine" and isinstance(exc, EngineUnresponsive) and self._loop_silent_since is None:
                    self._loop_silent_since = asked_at
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
                if source.reach == "engine":
                    self._loop_silent_since = None
                    # Before that the API server answers by itself.
                    if self.capabilities.at_least("0.17"):
                        self._loop_answered_at = self._clock()
                outcome.observation = _merge(outcome.observation, seen)

    def _is_at_rest(self, load: EngineLoad | None) -> bool:
        """Return whether nothing ran since the workers were last called."""
        return load is not None and load.is_idle and load.work_done is not None and load.work_done == self._work_done

    def _must_detect(self) -> bool:
        if self._detected_at is None:
            return True
        is_settled = self.capabilities.collective_rpc or self.coverage.is_complete
        return not is_settled and self._clock() - self._detected_at >= REDETECT_SECONDS

    async def _detect(self) -> None:
        self._detected = await detect(self._engine, assume_extension=self._engine_has_extension)
        self._detected_at = self._clock()
        self._allow_rpc(self._detected)

    def _hear_of_rpc(self) -> None:
        """Allow worker calls while every worker's recorder lives and says that it has our operations.

        Files may be another engine's: a call that fails ends what they allow, for this life of the engine.
        """
        if self._detected_at is None or self._detected.collective_rpc or self._recorders is None:
            return
        is_trusted = self._detected.dev_mode and not self._engine.has_rpc_failed
        may_call = is_trusted and self.coverage.offers_calls
        if may_call != self.capabilities.collective_rpc:
            self._allow_rpc(replace(self._detected, collective_rpc=may_call))

    def _allow_rpc(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.public_capabilities = capabilities.public()
        self._engine.rpc_allowed = capabilities.collective_rpc

    async def _begin_recorders(self, outcome: Round) -> None:
        """Follow recorders that run already; start those that do not, where workers can be called."""
        progress = outcome.before.report.progress
        if progress is not None and progress.verdict == "busy":
            return  # of those that run; the others would not hear of it before the step is over
        if self._recorders is None:
            return
        can_start = self._detected.collective_rpc  # not by their word: where it is needed they run
        await self._recorders.adopt(self_started=can_start)
        if self.coverage.is_complete:
            self._recorders.settle()
        elif can_start and self._recorders.must_begin():
            await self._recorders.begin()

    async def _follow_start(self, outcome: Round) -> None:
        """Follow the recorders of an engine that loads: they write long before its API server listens."""
        if self._recorders is None or not STATES[outcome.before.state].is_absent:
            return
        records = self._recorders.records
        if self._recorders.are_followed and workers_left(records, len(records)) is not None:
            outcome.start_failure = start_failure(records, self._wall_clock())
            outcome.has_start_ended = True
            self._recorders.forget()
        await self._recorders.adopt(former=outcome.before.recorder_instance, self_started=True)


def _merge(first: Observation, second: Observation) -> Observation:
    return Observation(
        workers=second.workers if second.workers is not None else first.workers,
        load=second.load or first.load,
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
