"""Runs one remedy at a time, and measures what it freed by a poll before and after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from highwater.act.quiescer import CALL_SECONDS, STATES, CannotQuiesce, Quiesced, Quiescer, State, States
from highwater.act.remedies import (
    MAX_SECONDS,
    NO_OPTIONS,
    Remedy,
    RunOptions,
    RunResult,
    call_workers_in_rounds,
    operators_only,
)
from highwater.engine.capabilities import no_extension
from highwater.engine.client import Engine, EngineResponse
from highwater.model.engine import EngineStatus
from highwater.model.rank import RankReading
from highwater.model.remedies import UNNEEDED, Mode, Outcome, RemedyResult, Target, credit, freed, possible_bytes, total
from highwater.model.report import Caller, ReliefNow, Report, Trigger
from highwater.model.units import counted, gib_text, whole_span_text
from highwater.process.errors import EngineError, NotAvailable, Refused, RequestError, UnknownName
from highwater.watch.history import History
from highwater.watch.poller import Poller

JUST_BEFORE_SECONDS = 0.25
# How long a remedy that the engine puts off is repeated: its blocks come free a step after its requests.
PATIENCE_SECONDS = 2.0
# The calls of one poll besides the workers'.
POLL_SECONDS = 20.0
# Beyond what the calls of a state may take by themselves, so that they report what went wrong.
MARGIN_SECONDS = 1.0

log = logging.getLogger("highwater.act")


class Observer(Protocol):
    def remedy_ended(self, result: RemedyResult, trigger: Trigger) -> None:
        """One remedy was run, refused or failed."""

    def policy_acted(self, rule: str, remedy: str, outcome: str) -> None:
        """One remedy was run for a rule, or would have been."""


@dataclass(frozen=True, slots=True)
class RemedyRun:
    remedy: Remedy
    trigger: Trigger
    mode: Mode = "safe"
    rule: str | None = None
    options: RunOptions = NO_OPTIONS
    force: bool = False
    release_after: bool = True
    caller: Caller | None = None
    why: str | None = None  # of a rule's run, as a clause


@dataclass(frozen=True, slots=True)
class RemedyOutcome:
    result: RemedyResult
    before: tuple[RankReading, ...]
    after: tuple[RankReading, ...]
    answer: EngineResponse | None = None


@dataclass(frozen=True, slots=True)
class RemedyRequest:
    remedy: str
    target: Target = UNNEEDED


class _NotRun(NotAvailable, status=NotAvailable.status, code=NotAvailable.code):
    """No engine was reachable before a remedy; ``result`` is as it was recorded."""

    def __init__(self, result: RemedyResult) -> None:
        super().__init__(result.reason)
        self.result = result


class Relief:
    """Runs remedies for the policy and for operators. The clock is in monotonic seconds."""

    def __init__(
        self,
        engine: Engine,
        poller: Poller,
        history: History,
        quiescer: Quiescer,
        *,
        remedies: Sequence[Remedy],
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self.remedies: Mapping[str, Remedy] = {remedy.name: remedy for remedy in remedies}
        self._engine = engine
        self._poller = poller
        self._history = history
        self._quiescer = quiescer
        self._observer = observer
        self._clock = clock
        self._states = States()
        self._under_way: tuple[RemedyRun, float] | None = None

    @property
    def now(self) -> ReliefNow | None:
        if self._under_way is None:
            return None
        (run, began), gate = self._under_way, self._quiescer.gate
        running, held, seconds = gate.in_flight, gate.held, self._clock() - began
        doing = STATES[self.state].doing.format(remedy=run.remedy.name, requests=counted(running, "request"))
        waiting = f"; {counted(held, 'new request')} held" if held else ""
        return ReliefNow(
            remedy=run.remedy.name,
            trigger=run.trigger,
            state=self.state,
            seconds=seconds,
            requests_running=running,
            requests_held=held,
            text=f"giving back: {doing}, {whole_span_text(seconds)}{waiting}",
            why=run.why,
        )

    @property
    def state(self) -> State:
        return self._states.now

    @property
    def busy(self) -> bool:
        return self._states.busy

    def unavailable(self, name: str, status: EngineStatus) -> str | None:
        remedy = self.remedies[name]
        if (refusal := self._why_not(remedy, status, "safe", by_policy=True)) is not None:
            return refusal
        return self._quiescer.impossible if remedy.needs_gate(self._poller.capabilities, "safe") else None

    def _why_not(self, remedy: Remedy, status: EngineStatus, mode: Mode, *, by_policy: bool) -> str | None:
        can = self._poller.capabilities
        refusal = operators_only(remedy, can, status) if by_policy else None
        return refusal or remedy.refusal(can, status, mode)

    async def for_rule(
        self, rule: str, name: str, *, why: str, target: Target = UNNEEDED, observe: bool = False
    ) -> RemedyOutcome:
        """Run one remedy for a rule, or only record that it would have been run. Raises NotAvailable as `_before`."""
        run = RemedyRun(self.remedies[name], "policy", rule=rule, options=RunOptions(target=target), why=why)
        if observe:
            return RemedyOutcome(self._ended(run, "observed", "the policy is in observe mode"), (), ())
        return await self._carry_out(run)

    async def reclaim(
        self, requests: Sequence[RemedyRequest], *, mode: Mode, dry_run: bool, caller: Caller | None = None
    ) -> list[RemedyOutcome]:
        """Run remedies in order; without any, those that free caches here. Raises UnknownName, and as `_before`.

        Once one has run, an engine that is lost before the next one is a result: the first one's must not go with it.
        A dry run says what each could give back by the last report: it calls nobody and leaves no trace.
        """
        # A trim keeps what a reset then drops: one of the two.
        cache = "reset_encoder_cache" if self._poller.capabilities.reset_encoder_cache else "trim_encoder_cache"
        requests = requests or (RemedyRequest("release"), RemedyRequest(cache))
        for request in requests:
            if request.remedy not in self.remedies:
                raise UnknownName("remedies", request.remedy, self.remedies)
        if dry_run:
            return [self._dry_run(request, mode) for request in requests]
        outcomes: list[RemedyOutcome] = []
        for request in requests:
            options = RunOptions(target=request.target)
            run = RemedyRun(self.remedies[request.remedy], "reclaim", mode=mode, options=options, caller=caller)
            try:
                outcomes.append(await self._carry_out(run))
            except _NotRun as exc:
                if all(each.result.outcome == "refused" for each in outcomes):
                    raise
                outcomes.append(RemedyOutcome(exc.result, (), ()))
        return outcomes

    def _dry_run(self, request: RemedyRequest, mode: Mode) -> RemedyOutcome:
        report, remedy = self._poller.current(), self.remedies[request.remedy]
        if not report.engine.traits.is_up:
            raise NotAvailable(report.engine.in_words)
        is_held = remedy.needs_gate(self._poller.capabilities, mode)
        refusal = self._why_not(remedy, report.engine, mode, by_policy=False)
        refusal = refusal or (self._quiescer.refusal() if is_held else None)
        result = RemedyResult(
            remedy=remedy.name,
            outcome="observed" if refusal is None else "refused",
            reason=refusal,
            frees=remedy.traits.frees,
            does_not_free=remedy.traits.does_not_free,
        )
        if refusal is None:
            can_give = None if report.stale else possible_bytes(remedy.name, report.ranks, request.target)
            known = "what it could give back is not known"
            if can_give is not None:
                known = f"could give back {gib_text(can_give)}"
            elif not remedy.traits.components:
                known = "gives back no device memory"
            plan = self._quiescer.plan() if is_held else "no request has to wait for it"
            would = f"{known}; {plan}"
            result = replace(result, can_give_bytes=can_give, would=would, reason=f"dry run; {would}")
        return RemedyOutcome(result, report.ranks, report.ranks)

    async def drop_in(
        self, name: str, *, query: str, mode: Mode, force: bool, caller: Caller | None = None
    ) -> RemedyOutcome:
        """Run one of vLLM's own resets. Raises Refused where it could hang or kill the engine, and as `_before`."""
        # No release after it: a client that requests vLLM's reset gets that and nothing more.
        run = RemedyRun(
            self.remedies[name],
            "drop-in",
            mode=mode,
            options=RunOptions(query=query),
            force=force,
            release_after=False,
            caller=caller,
        )
        outcome = await self._carry_out(run)
        if outcome.result.outcome == "refused":
            raise Refused(f"{name}: {outcome.result.reason}")
        return outcome

    async def restore(self, *, caller: Caller | None = None) -> list[Mapping[str, Any]]:
        """Bring back what a trim moved to the host, by rank. Raises Refused where a worker cannot, and NotAvailable."""
        if (problem := no_extension(self._poller.capabilities)) is not None:
            raise Refused(problem)
        async with self._states.one_relief():
            try:
                async with self._states.enter("calling", self._rounds_seconds()):
                    restored = await call_workers_in_rounds(self._engine, "restore", {})
            except EngineError as exc:
                raise NotAvailable(self._not_restored(str(exc), caller)) from exc
            except TimeoutError as exc:
                late = f"it has not ended within {self._rounds_seconds():g} s"
                raise NotAvailable(self._not_restored(late, caller)) from exc
            report = await self._poll("measuring") if restored.ok else None
        if not restored.ok:
            raise Refused(self._not_restored(str(restored.reason), caller))
        spilled = report.encoder_cache.host_bytes if report is not None and report.encoder_cache else None
        left = "what is left on the host is not known" if spilled is None else f"{gib_text(spilled)} left on the host"
        self._history.record("reset", f"encoder outputs brought back to the device, {left}", caller=caller)
        return list(restored.detail)

    def _not_restored(self, reason: str, caller: Caller | None) -> str:
        message = f"restore: {reason}"
        self._history.record("reset", message, caller=caller)
        return message

    # --- running one remedy ---

    async def _carry_out(self, run: RemedyRun) -> RemedyOutcome:
        async with self._states.one_relief():
            self._under_way = run, self._clock()
            try:
                return await self._relieve(run)
            except RequestError:
                raise  # recorded where it arose
            except BaseException as exc:
                # Cancelled, or unexpected: raised again, and recorded first, as the remedy may have run.
                what = "cancelled" if isinstance(exc, asyncio.CancelledError) else repr(exc)
                self._ended(run, "failed", f"{what} while {self.state}")
                raise
            finally:
                self._under_way = None

    async def _relieve(self, run: RemedyRun) -> RemedyOutcome:
        before = await self._before(run)
        refusal = self._why_not(run.remedy, before.engine, run.mode, by_policy=run.trigger == "policy")
        if refusal is not None and not run.force:
            return self._refused(run, before, refusal)
        is_held = not run.force and run.remedy.needs_gate(self._poller.capabilities, run.mode)

        started = self._clock()
        quiesced: Quiesced | None = None
        try:
            if is_held:
                async with self._quiescer.quiet(self._states, then_pace=run.remedy.paces_after) as quiesced:
                    done = await self._call(run, CALL_SECONDS)
            else:
                quiesced, done = Quiesced("nothing"), await self._call(run, self._rounds_seconds())
        except CannotQuiesce as exc:
            return self._refused(run, before, str(exc), exc.held_seconds)
        except EngineError as exc:
            # Raised by the engine's counts before the remedy: nothing was done.
            done = RunResult(ok=False, reason=str(exc))
        if done.refused:
            return self._refused(run, before, done.reason or "refused by the workers")
        return await self._measured(run, before, done, quiesced, started)

    async def _measured(
        self, run: RemedyRun, before: Report, done: RunResult, quiesced: Quiesced | None, started: float
    ) -> RemedyOutcome:
        is_released = run.release_after and self._engine.rpc_allowed
        if done.ok and run.remedy.traits.needs_release and is_released:
            done = await self._release_after(done)
        readings: tuple[RankReading, ...] = ()
        unmeasured = None
        if quiesced is not None:
            if (report := await self._poll("measuring")) is None:
                unmeasured = f"not measured, as no reading came within {self._poll_seconds():g} s"
            # An engine that is late once is not lost: after a round without readings the poller keeps the old objects.
            elif report.stale or not report.ranks or report.ranks is before.ranks:
                why = report.engine.hint or report.engine.state
                unmeasured = f"not measured, as no reading came after it: {why}" if before.ranks else None
            else:
                readings = report.ranks
        if not done.ok:
            # How much of it was done, and by when, is unknown: the difference could have any cause.
            readings, unmeasured = (), "not measured"
        deltas = freed(before.ranks, readings)
        freed_bytes, freed_components = total(deltas)
        credited = credit(run.remedy.name, before.ranks, readings, done.detail, is_released=is_released)
        reason = "; ".join(text for text in (done.reason, unmeasured) if text) or None
        result = self._ended(
            run,
            "done" if done.ok else "failed",
            reason,
            seconds=self._clock() - started,
            freed_bytes=freed_bytes,
            freed_components=freed_components,
            ranks=deltas,
            credited_bytes=credited.freed_bytes,
            credited_components=credited.components,
            quiesced_by=quiesced.by if quiesced is not None else None,
            held_seconds=quiesced.held_seconds if quiesced is not None else None,
            detail=done.detail,
        )
        return RemedyOutcome(result, before.ranks, readings, done.answer)

    async def _call(self, run: RemedyRun, seconds: float) -> RunResult:
        """Run the remedy itself. A failure becomes its result, so that the gate opens in order."""
        patience, connector = PATIENCE_SECONDS if run.mode == "safe" else 0.0, self._poller.capabilities.kv_connector
        options = replace(run.options, patience_seconds=patience, kv_connector=connector)
        try:
            async with self._states.enter("calling", seconds):
                return await run.remedy.run(self._engine, options)
        except TimeoutError:
            return RunResult(ok=False, reason=f"it has not ended within {seconds:g} s")
        except EngineError as exc:
            return RunResult(ok=False, reason=str(exc))

    async def _release_after(self, done: RunResult) -> RunResult:
        """Have the allocator give back what the remedy gave it: only then does the device see the bytes."""
        seconds = 2 * self._engine.rpc_deadline_seconds + MARGIN_SECONDS
        try:
            async with self._states.enter("releasing", seconds):
                await self._engine.rpc("release")
        except TimeoutError:
            return replace(done, ok=False, reason=f"done, but the release after it has not ended within {seconds:g} s")
        except EngineError as exc:
            return replace(done, ok=False, reason=f"done, but not the release after it: {exc}")
        return done

    async def _poll(self, state: State) -> Report | None:
        try:
            async with self._states.enter(state, self._poll_seconds()):
                return await self._poller.poll()
        except TimeoutError:
            return None

    def _poll_seconds(self) -> float:
        return self._engine.rpc_deadline_seconds + POLL_SECONDS

    def _rounds_seconds(self) -> float:
        # The first call may wait for a poll's, and the last one begins just before the rounds' own time is up.
        return MAX_SECONDS + 2 * self._engine.rpc_deadline_seconds + MARGIN_SECONDS

    def _refused(self, run: RemedyRun, before: Report, reason: str, held_seconds: float | None = None) -> RemedyOutcome:
        result = self._ended(run, "refused", reason, held_seconds=held_seconds)
        return RemedyOutcome(result, before.ranks, before.ranks)

    async def _before(self, run: RemedyRun) -> Report:
        """Return a fresh reading: the last one if it was taken just before, as for the policy it was.

        Raises NotAvailable where no engine is reachable: recorded as a failed reset, or as a refusal while it starts.
        """
        report = self._poller.current()
        age = report.age_seconds
        # Now means from now on: an operator's own measurement must not begin before it.
        if run.mode == "now" or report.stale or age is None or age > JUST_BEFORE_SECONDS:
            polled = await self._poll("reading")
            if polled is None:
                raise self._not_available(run, f"no reading came within {self._poll_seconds():g} s")
            report = polled
        traits = report.engine.traits
        if not traits.is_up or (report.stale and traits.is_late):
            # An engine that still starts has nothing to give back: no reset of it has failed.
            outcome: Outcome = "refused" if report.engine.state == "starting" else "failed"
            raise self._not_available(run, report.engine.in_words, outcome)
        return replace(report, ranks=()) if report.stale else report

    def _not_available(self, run: RemedyRun, reason: str, outcome: Outcome = "failed") -> NotAvailable:
        return _NotRun(self._ended(run, outcome, reason))

    def _ended(self, run: RemedyRun, outcome: Outcome, reason: str | None, **figures: Any) -> RemedyResult:  # noqa: ANN401 - fields of the result
        """Write down how it ended, also where it was refused, failed or cancelled."""
        traits = run.remedy.traits
        result = RemedyResult(
            remedy=traits.name,
            outcome=outcome,
            reason=reason,
            frees=traits.frees,
            does_not_free=traits.does_not_free,
            **figures,
        )
        self._observer.remedy_ended(result, run.trigger)
        kind: Literal["refusal", "reset"] = "refusal" if result.outcome == "refused" else "reset"
        summary = result.summary + (f"; why: {run.why}" if run.why else "")
        self._history.record(
            kind, summary, trigger=run.trigger, rule=run.rule, result=result, caller=run.caller, why=run.why
        )
        by = f"{run.trigger} by {run.caller.address or 'an unknown peer'}" if run.caller else run.trigger
        log.info("%s (%s)", summary, run.rule or by)
        return result
