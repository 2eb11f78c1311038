"""The loop: ask every source, account for what they say, keep the report. Decides nothing.

Polls never overlap, keep to a grid without jitter, and never repeat a worker call that has not come back. While the
engine is idle the workers are asked less often: vLLM's multiprocess workers spin on a core for a second after each call
(vllm/distributed/device_communicators/shm_broadcast.py, ``SpinCondition``), so that a call a second would keep a core
busy for each rank, and nothing moves in an idle engine. Where every rank has a flight recorder, its file is read, and a
call is only the sign that the engine's loop still answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from app.attribution import account, encoder_totals, growth, rank_key
from app.capabilities import EXTENSION, Capabilities, detect
from app.engine import Engine
from app.errors import EngineError, EngineUnreachable, EngineUnresponsive, EngineUntrusted
from app.flight import Flight, is_complete, missing_ranks
from app.history import History
from app.life import EngineLife
from app.readings import (
    EngineLoad,
    EngineState,
    EngineStatus,
    Growth,
    MissingRank,
    Movement,
    RankReading,
    Report,
)
from app.sources import Observation, Source
from app.sources.recorder import RankRecord
from app.sources.workers import Workers
from app.table import missing_text

GROWTH_SECONDS = 60.0
# How often an engine without our extension is asked again whether it has it now.
REDETECT_SECONDS = 30.0

log = logging.getLogger("highwater.poller")


class PollObserver(Protocol):
    """Who counts polls."""

    def polled(self, seconds: float) -> None:
        """One round is over."""

    def poll_failed(self, source: str, reason: str) -> None:
        """One source failed in it."""


@dataclass(slots=True)
class _Round:
    """What one round of questions brought."""

    observation: Observation = field(default_factory=Observation)
    records: tuple[RankRecord, ...] = ()
    movement: Movement | None = None
    missing: tuple[MissingRank, ...] = ()
    failure: EngineError | None = None
    first_failure: str | None = None
    rested: bool = False


class Poller:
    """Polls the engine and keeps the last report.

    Args:
        engine: The engine.
        sources: Where readings come from, in the order in which they are asked.
        history: Where reports and state changes are kept.
        poll_seconds: Time between polls.
        idle_poll_seconds: Time between two questions to workers that need not be asked: of an idle engine, or of one
            whose flight recorders tell the same.
        stale_seconds: The age from which a report is stale.
        engine_has_extension: The operator's word that our extension is loaded under another name.
        observer: Who counts polls.
        flight: The workers' flight recorders, if they have any.
        clock: Unix seconds.
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
        flight: Flight | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
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
        self._flight = flight
        self._clock = clock
        self._turn = asyncio.Lock()
        self._detected_at: float | None = None
        self._was_reached = False
        self._work_done: float | None = None
        self._workers_asked_at: float | None = None
        self._public_capabilities: dict[str, Any] = {}
        self._baseline: tuple[RankReading, ...] = ()
        self._last = Report(engine=EngineStatus(url=engine.url, state="starting", hint="not asked yet"))

    # --- what others ask ---

    def current(self) -> Report:
        """The last report, with its age as of now."""
        if self._last.taken_at is None:
            return self._last
        age = max(self._clock() - self._last.taken_at, 0.0)
        return replace(self._last, age_seconds=age, stale=self._last.stale or age > self._stale_seconds)

    @property
    def baseline(self) -> tuple[RankReading, ...]:
        """The first readings after the engine became ready; empty before."""
        return self._baseline

    @property
    def life(self) -> EngineLife:
        """The engine's present life."""
        return EngineLife(id=",".join(str(rank.pid) for rank in self._baseline), baseline=self._baseline)

    async def run(self) -> None:
        """Poll until cancelled, on a grid that a slow poll does not shift."""
        next_at = time.monotonic()
        while True:
            try:
                await self.poll(spare_idle=True)
            except Exception:
                # The loop is the product: whatever one round met, the next must come. It is logged and counted.
                log.exception("poll failed unexpectedly")
                self._observer.poll_failed("poller", "unexpected")
            now = time.monotonic()
            missed = max(int((now - next_at) // self._poll_seconds), 0)
            next_at += (missed + 1) * self._poll_seconds
            await asyncio.sleep(next_at - now)

    async def poll(self, *, spare_idle: bool = False) -> Report:
        """One round, now. Rounds asked for at the same time run one after the other.

        Args:
            spare_idle: Leave all but the API server alone if the engine has done nothing since they were last asked.
        """
        async with self._turn:
            started = time.monotonic()
            outcome = await self._ask(spare_idle=spare_idle)
            report = self._conclude(outcome)
            self._observer.polled(time.monotonic() - started)
        for listener in self.listeners:
            listener(report)
        return report

    # --- asking ---

    async def _ask(self, *, spare_idle: bool) -> _Round:
        outcome, began = _Round(), self._clock()
        try:
            if self._must_detect():
                await self._detect()
            await self._begin_flight()
        except EngineError as exc:
            self._observer.poll_failed("detection", exc.reason)
            outcome.failure = exc
            return outcome
        available = [source for source in self._sources if source.available(self.capabilities)]
        await self._ask_each([source for source in available if not source.wakes_engine], outcome)
        await self._look(outcome, after=None if spare_idle or outcome.failure is not None else began)
        if outcome.failure is None:
            await self._wake([source for source in available if source.wakes_engine], outcome, spare_idle=spare_idle)
        return outcome

    async def _wake(self, waking: Sequence[Source], outcome: _Round, *, spare_idle: bool) -> None:
        """Ask those who do not answer for nothing."""
        spared = [source for source in waking if spare_idle and self._may_spare(source, outcome)]
        outcome.rested = bool(spared)
        asking = asyncio.create_task(self._ask_each([source for source in waking if source not in spared], outcome))
        try:
            while self._flight is not None and not (await asyncio.wait({asking}, timeout=self._poll_seconds))[0]:
                await self._look(outcome)
                if outcome.movement is not None and outcome.movement.verdict == "stuck":
                    return  # nobody will answer: the deadline need not pass before that is told
            await asking
        finally:
            asking.cancel()
        if outcome.failure is not None:
            # Meanwhile a deadline has passed: a step that was not there before may be what held the answer up.
            await self._look(outcome)

    async def _look(self, outcome: _Round, *, after: float | None = None) -> None:
        """Read the flight recorders, which needs nobody's answer."""
        if self._flight is None:
            return
        records = await self._flight.read(after=after)
        if isinstance(outcome.failure, EngineUnreachable):
            # Its workers' files look alive for a little longer than they are. The black box wants them all the same.
            outcome.records, outcome.movement = (), None
            return
        held = self._last.engine.state in ("paused", "sleeping")
        outcome.records = records
        outcome.movement = self._flight.movement(records, outcome.observation.load, held=held)

    async def _ask_each(self, sources: Sequence[Source], outcome: _Round) -> None:
        for source in sources:
            try:
                seen = await source.read()
            except EngineError as exc:
                self._observer.poll_failed(source.name, exc.reason)
                outcome.first_failure = outcome.first_failure or f"{source.name}: {exc}"
                if isinstance(exc, EngineUnreachable | EngineUnresponsive):
                    # Asking on would only add questions to a queue that does not move.
                    outcome.failure = exc
                    return
            else:
                outcome.observation = _merge(outcome.observation, seen)

    def _may_spare(self, source: Source, outcome: _Round) -> bool:
        """Whether what this source would say is known, or would come too late."""
        if outcome.movement is not None and outcome.movement.verdict == "busy":
            return True  # the loop answers nobody before its step is over
        asked_at = self._workers_asked_at
        if asked_at is None or self._last.stale:
            return False
        # A little less than the time itself, or the poll that falls on it would be one poll late.
        if self._clock() - asked_at >= self._idle_poll_seconds - self._poll_seconds / 2:
            return False
        return self._is_at_rest(outcome.observation.load) or (
            source.name == Workers.name
            and outcome.movement is not None
            and outcome.movement.verdict in ("moving", "idle")
            and is_complete(outcome.records, self.capabilities.ranks_expected)
        )

    def _is_at_rest(self, load: EngineLoad | None) -> bool:
        """Whether nothing ran since the workers were last asked."""
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

    async def _begin_flight(self) -> None:
        movement = self._last.movement
        if movement is not None and movement.verdict == "busy":
            return  # of those that run; the others would not hear of it before the step is over
        if self._flight is not None and self.capabilities.collective_rpc and self._flight.must_begin():
            await self._flight.begin()

    # --- concluding ---

    def _conclude(self, outcome: _Round) -> Report:
        was, seen = self._last, outcome.observation
        ranks = None if isinstance(outcome.failure, EngineUnreachable) else self._heard(outcome)
        state = self._state(outcome)
        if isinstance(outcome.failure, EngineUnreachable) or self._is_another_engine(ranks):
            self._forget_engine()
        elif outcome.failure is None:
            self._was_reached = True
        if ranks and state == "ready":
            known = {rank_key(rank) for rank in self._baseline}
            self._baseline += tuple(rank for rank in ranks if rank_key(rank) not in known)
        if seen.metrics_text is not None:
            self.metrics_text = seen.metrics_text
        outcome.missing = was.ranks_missing
        if ranks is not None:
            outcome.missing = missing_ranks(self.capabilities, ranks, outcome.records, was.ranks_missing, was.ranks)
        status = self._status(state, seen.load or EngineLoad(), outcome)
        if ranks is None:
            # What was last known stays, with its age and marked as stale where the engine is not there to confirm it.
            lost = was.stale or outcome.failure is not None
            expected = self.capabilities.ranks_expected
            self._last = replace(was, engine=status, stale=lost, ranks_expected=expected, movement=outcome.movement)
        else:
            self._last = self._fresh(status, ranks, outcome)
        if seen.workers is not None:
            self._work_done = seen.load.work_done if seen.load is not None else None
            self._workers_asked_at = self._clock()
        self._history.add(self._last)
        if was.engine.state != state:
            self._history.record("state", f"engine {was.engine.state} -> {state}" + _because(status.hint))
            log.info("engine %s -> %s%s", was.engine.state, state, _because(status.hint))
        return self.current()

    def _heard(self, outcome: _Round) -> tuple[RankReading, ...] | None:
        """Every rank's best reading, in the ranks' order; ``None`` where nobody was heard of."""
        answered = tuple(map(account, outcome.observation.workers or ()))
        if not outcome.records:
            return answered or None
        found = {rank_key(reading): reading for reading in answered}
        alive = [record.newest for record in outcome.records if record.status == "alive" and record.newest is not None]
        if not found and not alive:
            return None
        if outcome.rested and self._workers_asked_at is not None:
            # Who was left alone has not gone: what these workers answered last still holds.
            lost = {
                (record.identity.dp_rank or 0, record.identity.rank or 0)
                for record in outcome.records
                if record.status != "alive"
            }
            kept = {rank_key(rank): rank for rank in self._last.ranks if rank.source == "rpc"}
            found = {key: rank for key, rank in kept.items() if key not in lost} | found
        for reading in (account(newest, "recorder") for newest in alive):
            key = rank_key(reading)
            if key not in found or self._is_better(reading, found[key]):
                found[key] = reading
        return tuple(found[key] for key in sorted(found))

    def _is_better(self, recorded: RankReading, answered: RankReading) -> bool:
        """Whether a recorder's reading is worth more than the worker's answer: newer, and not for long with less."""
        newer_by = recorded.taken_at - answered.taken_at
        tells_less = recorded.torch.allocated_bytes is None and answered.torch.allocated_bytes is not None
        return newer_by > (self._idle_poll_seconds if tells_less else 0.0)

    def _fresh(self, status: EngineStatus, ranks: tuple[RankReading, ...], outcome: _Round) -> Report:
        return Report(
            taken_at=min((rank.taken_at for rank in ranks), default=self._clock()),
            age_seconds=0.0,
            stale=False,
            engine=status,
            ranks_expected=self.capabilities.ranks_expected,
            ranks_reported=len(ranks),
            ranks=ranks,
            ranks_missing=outcome.missing,
            movement=outcome.movement,
            encoder_cache=encoder_totals(ranks),
            growth=growth(self._baseline, ranks, self._history.recent_used(GROWTH_SECONDS))
            if self._baseline
            else Growth(),
        )

    def _state(self, outcome: _Round) -> EngineState:
        if outcome.failure is not None and not isinstance(outcome.failure, EngineUnresponsive):
            return "gone" if self._was_reached else "starting"
        verdict = outcome.movement.verdict if outcome.movement is not None else "unknown"
        if verdict == "stuck" or (outcome.failure is not None and verdict not in ("busy", "moving")):
            return "stuck"
        load = outcome.observation.load
        if load is not None and load.sleeping:
            return "sleeping"
        paused = outcome.observation.paused
        if paused is None and (outcome.rested or outcome.failure is not None):
            paused = self._last.engine.state == "paused"
        return "paused" if paused else "ready"

    def _is_another_engine(self, ranks: tuple[RankReading, ...] | None) -> bool:
        if not ranks or not self._baseline:
            return False
        return {rank.pid for rank in ranks}.isdisjoint(rank.pid for rank in self._baseline)

    def _forget_engine(self) -> None:
        """The next engine at this address may be another version with other options: ask it again."""
        self._detected_at = None
        self._engine.rpc_allowed = False
        self._baseline = ()
        self._workers_asked_at = None
        if self._flight is not None:
            self._flight.forget()

    def _status(self, state: EngineState, load: EngineLoad, outcome: _Round) -> EngineStatus:
        return EngineStatus(
            url=self._engine.url,
            state=state,
            version=self.capabilities.version,
            model=self.capabilities.model,
            requests_running=load.requests_running,
            requests_waiting=load.requests_waiting,
            kv_cache_usage_ratio=load.kv_cache_usage_ratio,
            work_done=load.work_done,
            capabilities=self._public_capabilities,
            hint=self._hint(outcome),
        )

    def _hint(self, outcome: _Round) -> str | None:
        movement = outcome.movement
        if movement is not None and movement.verdict == "stuck":
            return movement.summary + ("" if outcome.failure is None else f" ({outcome.failure})")
        if movement is not None and outcome.failure is not None:
            return f"{outcome.failure} ({movement.summary})"  # the records alone saw nothing wrong
        if outcome.failure is not None:
            return _failure_hint(outcome.failure, self._engine.url, was_reached=self._was_reached)
        setup = _setup_hint(self.capabilities)
        if setup is not None or outcome.first_failure is not None:
            return setup or outcome.first_failure
        if outcome.missing:
            return self._missing_hint(outcome.missing)
        return self._flight.problem if self._flight is not None else None

    def _missing_hint(self, missing: Sequence[MissingRank]) -> str:
        expected = self.capabilities.ranks_expected or 0
        there = f"{expected - len(missing)} of {expected} ranks"
        if self._flight is None:
            return (
                f"{there} answer: vLLM's collective_rpc returns only the first data-parallel engine's results; with "
                "recorder_dir the others are heard of too"
            )
        problem = f"; {self._flight.problem}" if self._flight.problem else ""
        return f"{there} are heard of; missing: {missing_text(missing)}{problem}"


def _merge(first: Observation, second: Observation) -> Observation:
    return Observation(
        workers=second.workers if second.workers is not None else first.workers,
        load=second.load or first.load,
        metrics_text=second.metrics_text if second.metrics_text is not None else first.metrics_text,
        paused=second.paused if second.paused is not None else first.paused,
    )


def _failure_hint(failure: EngineError, url: str, *, was_reached: bool) -> str:
    if isinstance(failure, EngineUnreachable) and not isinstance(failure, EngineUntrusted):
        word = "any more" if was_reached else "yet"
        return f"nothing answers {word} at {url} ({failure}); is vLLM running there, and is engine_url right?"
    return str(failure)


def _setup_hint(capabilities: Capabilities) -> str | None:
    """Exactly what to add to the engine's command line for the workers' memory to be seen."""
    if capabilities.collective_rpc:
        return None
    flag = f"--worker-extension-cls {EXTENSION} (with the folder that holds worker_ext on its PYTHONPATH)"
    if not capabilities.dev_mode:
        return f"start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment and {flag}"
    if capabilities.extension is None and capabilities.server_info:
        return f"start vLLM with {flag}"
    if capabilities.extension is None:
        return (
            f"vLLM does not tell its worker extension (GET /server_info); if it was started with {flag}, "
            "set engine_has_extension=true"
        )
    return (
        f"vLLM was started with --worker-extension-cls {capabilities.extension}; if that class inherits from "
        f"{EXTENSION}, set engine_has_extension=true"
    )


def _because(hint: str | None) -> str:
    return f": {hint}" if hint else ""
