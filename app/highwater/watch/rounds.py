"""Makes the requests of one poll: reads the recorders' files, then requests the rest from the engine.

It keeps when each source responded, and which recorders are followed. What the engine can do is kept by
``Detection``; ``Round`` decides which requests are made, and the poller what follows from them. A source that fails
costs only itself; an engine that does not respond ends the round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from highwater.engine.capabilities import Detection
from highwater.engine.client import Engine
from highwater.model.engine import LOAD_FIGURES, EngineLoad
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.process.errors import EngineError, EngineRefused, EngineUnreachable, EngineUnresponsive
from highwater.watch.ranks import workers_left
from highwater.watch.recorder.progress import Demand, judge, requested_since
from highwater.watch.recorder.rank import processes_of
from highwater.watch.recorder.recorders import Coverage, Recorders, coverage
from highwater.watch.round import KnownBefore, Round
from highwater.watch.sources import Health, Source
from highwater.watch.starts import start_failure

SERVER_ERROR, UNAVAILABLE = 500, 503


class PollObserver(Protocol):
    def polled(self, seconds: float) -> None:
        """Count one round."""

    def poll_failed(self, source: str, reason: str) -> None:
        """Count a source that failed in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollTimes:
    poll_seconds: float  # between two polls
    idle_poll_seconds: float  # between two calls of the workers of an engine without work, if they have no recorders
    max_step_seconds: float  # the longest normal step, or worker call


class Rounds:
    """Makes the requests to one engine; ``requests_under_way`` counts those through this sidecar."""

    def __init__(
        self,
        engine: Engine,
        detection: Detection,
        sources: Sequence[Source],
        recorders: Recorders | None,
        times: PollTimes,
        *,
        requests_under_way: Callable[[], int],
        observer: PollObserver,
        clocks: Clocks,
    ) -> None:
        self.url = engine.url
        self.recorders = recorders
        self.times = times
        self.observer = observer
        self.clocks = clocks
        self.detection = detection
        self._monotonic = clocks.monotonic
        self._sources = sources
        self._engine = engine
        self._health = Health(engine)
        self._requests_under_way = requests_under_way
        self._answered_at: dict[str, float] = {}  # by the sources' names
        self._load: EngineLoad | None = None
        self._work_done: float | None = None  # when the workers responded last
        self._is_last_answered = False
        self._was_late = False
        # When the engine's loop responded last, and since when it has not.
        self._loop_answered_at: float | None = None
        self._loop_silent_since: float | None = None
        # The calls that the workers' recorders have counted, and when the count changed last.
        self._calls: tuple[tuple[int, int], ...] = ()
        self._called_at = float("-inf")
        self._requested_since: float | None = None
        self._asked_since: float | None = None  # the same, of what the ranks should run a step for

    @property
    def requested_seconds(self) -> float:
        """For how long there have been requests without a break, by vLLM's counts or through this sidecar."""
        return self._since(self._requested_since) or 0.0

    @property
    def coverage(self) -> Coverage:
        if self.recorders is None or not self.recorders.are_followed:
            return Coverage()
        return coverage(self.recorders.records, self.ranks_expected)

    @property
    def have_workers_answered(self) -> bool:
        return "workers" in self._answered_at

    @property
    def ranks_expected(self) -> int | None:
        by_recorders = None if self.recorders is None else self.recorders.ranks_expected
        by_engine = self.detection.capabilities.ranks_expected
        return (by_engine if self.detection.is_current else None) or by_recorders or by_engine

    @property
    def model(self) -> str | None:
        by_recorders = self.recorders.model if self.recorders is not None and self.recorders.are_followed else None
        return self.detection.capabilities.model or by_recorders

    def forget_engine(self) -> None:
        self.detection.forget_engine()
        self._answered_at.clear()
        self._loop_answered_at = self._loop_silent_since = self._asked_since = None
        self._load = None
        if self.recorders is not None:
            self.recorders.forget()

    # --- one round ---

    async def run(self, last: Report, recorder_instance: str | None, *, spare_idle: bool) -> Round:
        """Read the sources that are due, or (not ``spare_idle``) all; the others as in ``Round``."""
        outcome = self._begun(last, recorder_instance)
        if self._was_late:
            await asyncio.gather(self._run(outcome, spare_idle=spare_idle), self._read_models(outcome))
        else:
            await self._run(outcome, spare_idle=spare_idle)
        if self._health.name in outcome.failed:
            outcome.serves_models = False
        self._was_late = outcome.contact == "late"
        self._is_last_answered = outcome.failure is None and not outcome.failed
        self._load = outcome.load
        load = self._load or EngineLoad()
        if not (load.requests_running or load.requests_waiting or self._requests_under_way()):
            self._requested_since = None
        elif self._requested_since is None:
            self._requested_since = self._monotonic()
        if outcome.workers is not None:
            self._work_done = load.work_done
        outcome.ranks_expected, outcome.at = self.ranks_expected, self.clocks.wall()
        return outcome

    async def _read_models(self, outcome: Round) -> None:
        """Note whether the API server serves: it may be late with its metrics alone, and with /health it never is.

        While it scales it answers all but that with an error.
        """
        with suppress(EngineUnreachable, EngineUnresponsive):
            with suppress(EngineRefused):
                await self._engine.get("/v1/models")
            outcome.serves_models = True

    async def read_recorders(self, last: Report, recorder_instance: str | None) -> Round:
        outcome = self._begun(last, recorder_instance)
        outcome.rested = True
        await self._read_recorders(outcome)
        return outcome

    def _begun(self, last: Report, recorder_instance: str | None) -> Round:
        before = KnownBefore(
            last=last,
            recorder_instance=recorder_instance,
            load=self._load or EngineLoad(),
            work_done=self._work_done,
            was_answered=self._is_last_answered,
        )
        return Round(before=before)

    async def _run(self, outcome: Round, *, spare_idle: bool) -> None:
        began = self._monotonic()
        try:
            if self.detection.is_due(is_recorded=self.coverage.is_complete):
                await self.detection.detect()
        except EngineError as exc:
            self.observer.poll_failed("detection", exc.reason)
            outcome.end(exc, "api_server")
            if self.recorders is not None and outcome.before.last.engine.traits.is_absent:
                # Those of an engine that loads write long before its API server listens.
                records = self.recorders.records
                if self._are_left(outcome):
                    self.recorders.forget()
                elif self.recorders.are_followed and workers_left(records, len(records)) is not None:
                    outcome.start_failure = start_failure(records, self.clocks.wall())
                    outcome.ended_workers = processes_of(records)
                    self.recorders.forget()
                await self.recorders.adopt(former=outcome.before.recorder_instance, self_started=True)
            await self._read_recorders(outcome)
            return
        await self._begin_recorders(outcome)
        await self._read_recorders(outcome)
        can = self.detection.capabilities
        available = [source for source in self._sources if source.available(can)]
        direct = [source for source in available if source.reach == "api_server"]
        await self._read_api_server(direct, outcome, spare_idle=spare_idle)
        if outcome.failure is not None or not spare_idle:
            await self._read_recorders(outcome, began=None if outcome.failure is not None else began)
        else:
            self._judge(outcome)
        if outcome.failure is None:
            loop = [source for source in available if source.reach != "api_server"]
            due = self._due(loop, outcome) if spare_idle else loop
            outcome.rested = len(due) < len(loop)
            await self._read_loop(due, outcome)
        if outcome.failure is None and outcome.requests and not outcome.responses:
            # The API server runs, and responds with nothing but its own errors: the engine behind it may be dead.
            outcome.failure = outcome.server_error
            outcome.contact = "late" if outcome.server_error is not None else outcome.contact

    async def _read_api_server(self, sources: Sequence[Source], outcome: Round, *, spare_idle: bool) -> None:
        due = self._due(sources, outcome) if spare_idle else sources
        if len(due) < len(sources):
            outcome.load = self._load  # it holds if the server is up
        await self._read_each(due, outcome)
        before, now = (load.work_done if load is not None else None for load in (self._load, outcome.load))
        if (outcome.failed and outcome.server_error is None) or (before != now and None not in (before, now)):
            return  # an engine that works is not dead
        await self._read_each([self._health], outcome)
        refusal = outcome.server_error
        if refusal is None or refusal.status != UNAVAILABLE or self._health.name not in outcome.failed:
            return
        await self._read_each([source for source in sources if source not in due], outcome)
        if outcome.responses:
            outcome.failure = EngineRefused(f"the API server says that its engine is dead ({refusal})", UNAVAILABLE)
            outcome.contact = "dead"

    async def _read_loop(self, sources: Sequence[Source], outcome: Round) -> None:
        """Read the sources that need the engine's loop or its workers, as long as the recorders show that it moves."""
        reading = asyncio.create_task(self._read_each(sources, outcome))
        try:
            while (
                self.recorders is not None and not (await asyncio.wait({reading}, timeout=self.times.poll_seconds))[0]
            ):
                await self._read_recorders(outcome)
                progress = outcome.progress
                if progress is not None and progress.verdict == "stuck" and not progress.is_starved:
                    return  # no response will come: the deadline need not pass before that is reported
            await reading
        finally:
            reading.cancel()
        if outcome.failure is not None:
            # Meanwhile a deadline has passed: a step that began since may be what held the response up.
            await self._read_recorders(outcome)
        else:
            self._judge(outcome)  # a response shows that the loop runs

    async def _read_each(self, sources: Sequence[Source], outcome: Round) -> None:
        for source in sources:
            outcome.requests += 1
            began = self._monotonic()
            try:
                seen = await source.read()
            except EngineError as exc:
                self.observer.poll_failed(source.name, exc.reason)
                outcome.failed.add(source.name)
                if source.reach == "engine" and isinstance(exc, EngineUnresponsive) and self._loop_silent_since is None:
                    self._loop_silent_since = began
                outcome.first_failure = outcome.first_failure or f"{source.name}: {exc}"
                if isinstance(exc, EngineRefused) and exc.status >= SERVER_ERROR:
                    outcome.server_error = exc
                if isinstance(exc, EngineUnreachable | EngineUnresponsive):
                    # More requests would only lengthen a queue that does not move.
                    outcome.end(exc, source.reach)
                    return
            else:
                outcome.responses += source is not self._health  # which an API server answers that serves nothing
                self._answered_at[source.name] = self._monotonic()
                if source.reach == "engine":
                    self._loop_silent_since = None
                    # Before that the API server responds by itself.
                    if self.detection.capabilities.at_least("0.17"):
                        self._loop_answered_at = self._monotonic()
                outcome.take(seen)

    def _due(self, sources: Sequence[Source], outcome: Round) -> list[Source]:
        outcome.ranks_expected, outcome.coverage = self.ranks_expected, self.coverage
        outcome.requests_under_way = self._requests_under_way()
        outcome.still_seconds = self._monotonic() - self._called_at
        outcome.is_unanswered = self._loop_silent_since is not None
        return [
            source
            for source in sources
            if outcome.is_due(
                source.reach,
                self._since(self._answered_at.get(source.name)),
                idle_poll_seconds=self.times.idle_poll_seconds,
                slack=self.times.poll_seconds / 2,
            )
        ]

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else self._monotonic() - moment

    # --- the recorders ---

    async def _read_recorders(self, outcome: Round, *, began: float | None = None) -> None:
        """Read the recorders' files; wait, for a little, for readings from after ``began`` (monotonic seconds)."""
        if self.recorders is None:
            return
        outcome.records = await self.recorders.read(within_seconds=self._since(began))
        calls = tuple((one.identity.pid, one.progress.calls) for one in outcome.records if one.progress is not None)
        if calls != self._calls:
            self._calls, self._called_at = calls, self._monotonic()
            self._loop_silent_since = None
        self.detection.trust_recorders(offers_calls=self.coverage.offers_calls, are_read=bool(outcome.records))
        if outcome.failure is not None and outcome.before.last.engine.traits.is_absent:
            # An API server that listens and does not respond is not loading once every worker is up.
            is_up = outcome.contact != "refused" and all(record.is_up for record in outcome.records)
            is_alive = any(one.status == "alive" for one in outcome.records) and not self._are_left(outcome)
            outcome.is_loading = is_alive and not is_up
        self._judge(outcome)

    def _are_left(self, outcome: Round) -> bool:
        """Return whether the files that are followed are the ended life's: its workers write for a little longer."""
        before, instance = outcome.before, None if self.recorders is None else self.recorders.files.instance
        return before.last.engine.state == "gone" and instance is not None and instance == before.recorder_instance

    def _judge(self, outcome: Round) -> None:
        if not outcome.records or outcome.contact == "refused":
            # Workers' files look alive for a little longer than they are.
            outcome.progress = None
            return
        load, engine = outcome.known_load, self._engine
        unanswered = (engine.rpc_outstanding_seconds, self._since(self._loop_silent_since))
        answered = (engine.rpc_answer_age_seconds, self._since(self._loop_answered_at))
        demand = Demand(
            **{name: getattr(load, name) for name in (*LOAD_FIGURES, "waiting_by_reason")},
            kv_connector=self.detection.capabilities.kv_connector,
            proxied_requests=self._requests_under_way(),
            unanswered_seconds=max((one for one in unanswered if one is not None), default=None),
            answer_age_seconds=min((one for one in answered if one is not None), default=None),
            is_held=outcome.before.last.engine.traits.is_held or bool(load.sleeping or outcome.paused),
        )
        self._asked_since = requested_since(self._asked_since, demand, self._monotonic())
        outcome.progress = judge(
            outcome.records,
            demand,
            requested_seconds=self._since(self._asked_since) or 0.0,
            max_step_seconds=self.times.max_step_seconds,
        )

    async def _begin_recorders(self, outcome: Round) -> None:
        progress = outcome.before.last.progress
        if self.recorders is None or (progress is not None and progress.verdict == "busy"):
            return  # in a busy one those that do not run would not receive the call before the step is over
        can_start = self.detection.has_extension  # not by the recorders' files: they run then
        await self.recorders.adopt(self_started=can_start)
        if self.coverage.is_complete:
            self.recorders.forget_refusal()
        elif can_start and self.recorders.must_begin():
            await self.recorders.begin()
