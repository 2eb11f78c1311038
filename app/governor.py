"""Decide, act, measure, record: carries out what the pure policy decides and what operators ask for.

One remedy at a time, each measured by a fresh poll before and after it. Every remedy asked for leaves an event, also
one that was refused or failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from app.attribution import freed, host_used, total
from app.engine import Engine, EngineAnswer
from app.errors import EngineError, NotAvailable, Refused, UnknownName
from app.history import History
from app.policy import Decision, Rule, RuleMemory, baseline_problem, decide, judge, signal_value
from app.poller import Poller
from app.readings import (
    Mode,
    Outcome,
    PolicyStatus,
    RankReading,
    RemedyResult,
    RemedyState,
    Report,
    RulePhase,
    RuleStatus,
    Trigger,
)
from app.remedies import Remedy
from app.table import mib

# The rule in the leftmost of these phases gives the policy its state.
_URGENCY: tuple[RulePhase, ...] = ("acting", "futile", "above", "cooling", "below")
JUST_BEFORE_SECONDS = 0.25
WORKING_STATES = frozenset({"ready", "paused"})

log = logging.getLogger("highwater.governor")


class RemedyObserver(Protocol):
    """Who counts remedies."""

    def remedy_ended(self, result: RemedyResult, trigger: Trigger) -> None:
        """One remedy was run, refused or failed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A remedy's result with the readings around it and, on the drop-in paths, the engine's own answer."""

    result: RemedyResult
    before: tuple[RankReading, ...]
    after: tuple[RankReading, ...]
    answer: EngineAnswer | None = None


@dataclass(frozen=True, slots=True)
class _Order:
    """What to run and on whose behalf."""

    remedy: Remedy
    trigger: Trigger
    mode: Mode = "safe"
    rule: str | None = None
    query: str = ""
    force: bool = False
    dry_run: bool = False
    release_after: bool = True


class Governor:
    """Runs remedies, on the policy's behalf and on operators'.

    Args:
        engine: The engine.
        poller: For capabilities, and for fresh readings around each remedy.
        history: Where events go.
        remedies: All there are.
        rules: The policy's rules.
        mode: ``act``, or ``observe``: decide and record, and do nothing.
        observer: Who counts remedies.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        engine: Engine,
        poller: Poller,
        history: History,
        *,
        remedies: Sequence[Remedy],
        rules: Sequence[Rule],
        mode: Literal["act", "observe"],
        observer: RemedyObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.remedies: Mapping[str, Remedy] = {remedy.name: remedy for remedy in remedies}
        self.rules = tuple(rules)
        self.mode = mode
        self._engine = engine
        self._poller = poller
        self._history = history
        self._observer = observer
        self._clock = clock
        self._memories: dict[str, RuleMemory] = {}
        self._problems: dict[str, str] = {}
        self._acting = asyncio.Lock()
        self._news = asyncio.Event()

    # --- the policy's side ---

    def notice(self, report: Report) -> None:
        """A new report is there; ``run`` looks at it. Never blocks the poller."""
        del report
        self._news.set()

    async def run(self) -> None:
        """Look at every new report until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self.consider()
            except Exception:
                # One odd report must not end the watch; it is logged, and the next report is looked at afresh.
                log.exception("the policy failed unexpectedly")

    async def consider(self) -> None:
        """Judge the current report by every rule, and act where a rule says so."""
        self._check_baselines()
        for rule in self.rules:
            # One step for each report: the measuring poll after a remedy brings the report for the next.
            decision = self._decide(rule)
            if decision.action == "act":
                await self._act(rule, decision)

    def _decide(self, rule: Rule) -> Decision:
        memory = self._memories.get(rule.name, RuleMemory())
        if self._acting.locked():
            return Decision()  # an operator's remedy is running: its effect comes first
        memory_after, decision = decide(rule, memory, self._signal(rule), self._clock())
        self._remember(rule, memory_after)
        return decision

    def _signal(self, rule: Rule) -> float | None:
        """The rule's signal, ``None`` without a fresh report of a working engine: then nothing is done."""
        report = self._poller.current()
        if report.stale or report.engine.state not in WORKING_STATES:
            return None
        return signal_value(rule.signal, report)

    async def _act(self, rule: Rule, decision: Decision) -> None:
        remedy = self.remedies[decision.remedy or ""]
        order = _Order(remedy, "policy", rule=rule.name)
        measured: Measured | None = None
        try:
            measured = self._observe(order) if self.mode == "observe" else await self._carry_out(order)
        except NotAvailable as exc:
            log.info("rule %s: %s", rule.name, exc)  # recorded as an event already
        finally:
            # Also when cancelled in the middle: the rule must not stay in "acting".
            memory = judge(
                rule,
                self._memories.get(rule.name, RuleMemory()),
                remedy.name,
                outcome=measured.result.outcome if measured is not None else "failed",
                freed_bytes=_relief(rule, measured) if measured is not None else None,
                value=self._signal(rule),
                now=self._clock(),
            )
            self._remember(rule, memory)

    def _observe(self, order: _Order) -> Measured:
        result = _result(order.remedy, "observed", reason="the policy is in observe mode")
        self._record(order, result)
        return Measured(result, (), ())

    def _remember(self, rule: Rule, memory: RuleMemory) -> None:
        was = self._memories.get(rule.name, RuleMemory())
        self._memories[rule.name] = memory
        if was.phase != memory.phase:
            value = self._signal(rule)
            at = "" if value is None else f" at {rule.signal} {value:g}"
            self._history.record("policy", f"rule {rule.name}: {was.phase} -> {memory.phase}{at}", rule=rule.name)

    def _check_baselines(self) -> None:
        baseline = self._poller.baseline
        if not baseline:
            self._problems.clear()
            return
        # At rest means before any growth: the first readings after the engine became ready.
        at_rest = replace(self._poller.current(), ranks=baseline)
        for rule in self.rules:
            if rule.signal not in {"device_used_ratio", "device_free_bytes", "host_used_ratio"}:
                continue
            problem = baseline_problem(rule, signal_value(rule.signal, at_rest))
            if problem is not None and self._problems.get(rule.name) != problem:
                self._problems[rule.name] = problem
                self._history.record("baseline", problem, rule=rule.name)
                log.warning("%s", problem)

    def status(self) -> PolicyStatus:
        """The policy as it stands."""
        statuses = tuple(self._rule_status(rule) for rule in self.rules)
        phases = {status.phase for status in statuses}
        state: RulePhase = next((phase for phase in _URGENCY if phase in phases), "below")
        return PolicyStatus(state=state, mode=self.mode, rules=statuses)

    def _rule_status(self, rule: Rule) -> RuleStatus:
        memory = self._memories.get(rule.name, RuleMemory())
        now, unix = self._clock(), time.time()

        def remedy_state(name: str) -> RemedyState:
            worn = memory.worn_out.get(name)
            return RemedyState(
                name=name,
                futile=worn is not None and now < worn.retry_at,
                retry_at=unix + worn.retry_at - now if worn is not None else None,
                last_freed_bytes=memory.last_freed.get(name),
            )

        return RuleStatus(
            name=rule.name,
            signal=rule.signal,
            high_water=rule.high_water,
            low_water=rule.low_water,
            phase=memory.phase,
            value=self._signal(rule),
            since=unix + memory.since - now if memory.since else None,
            problem=self._problems.get(rule.name),
            remedies=tuple(remedy_state(name) for name in rule.remedies),
        )

    def replace_policy(self, rules: Sequence[Rule], mode: Literal["act", "observe"], what: str) -> None:
        """Take a new, already validated policy. What is remembered of unchanged rules stays."""
        unchanged = {rule.name for rule in rules if rule in self.rules}
        kept = {name: memory for name, memory in self._memories.items() if name in unchanged}
        self.rules, self.mode = tuple(rules), mode
        self._memories, self._problems = kept, {}
        self._history.record("policy", what)
        self._news.set()

    # --- the operators' side ---

    async def reclaim(self, names: Sequence[str], *, mode: Mode, dry_run: bool) -> list[Measured]:
        """Run remedies in this order on an operator's behalf.

        Raises:
            UnknownName: There is no such remedy.
            NotAvailable: The engine is not there to be asked.
        """
        for name in names:
            if name not in self.remedies:
                raise UnknownName("remedies", name, self.remedies)
        chosen = [self.remedies[name] for name in names]
        return [await self._carry_out(_Order(remedy, "reclaim", mode=mode, dry_run=dry_run)) for remedy in chosen]

    async def drop_in(self, name: str, *, query: str, mode: Mode, force: bool) -> Measured:
        """Run one of vLLM's own resets, as a client asked for it.

        Raises:
            Refused: It could hang or kill this engine.
            NotAvailable: The engine is not there to be asked.
        """
        # No release after it: a client that asks for vLLM's reset gets that and nothing more.
        order = _Order(self.remedies[name], "drop-in", mode=mode, query=query, force=force, release_after=False)
        measured = await self._carry_out(order)
        if measured.result.outcome == "refused":
            raise Refused(f"{name}: {measured.result.reason}")
        return measured

    # --- carrying out ---

    async def _carry_out(self, order: _Order) -> Measured:
        async with self._acting:
            return await self._measure(order)

    async def _measure(self, order: _Order) -> Measured:
        before = await self._before(order)
        refusal = order.remedy.refusal(self._poller.capabilities, before.engine, order.mode)
        if refusal is not None and not order.force:
            result = _result(order.remedy, "refused", reason=refusal)
            if not order.dry_run:
                self._record(order, result)
            return Measured(result, before.ranks, before.ranks)
        if order.dry_run:
            return Measured(_result(order.remedy, "observed", reason="dry run"), before.ranks, before.ranks)

        started = time.monotonic()
        reason: str | None
        try:
            run = await order.remedy.run(self._engine, order.query)
            if run.ok and order.remedy.needs_release and order.release_after and self._engine.rpc_allowed:
                await self._engine.rpc("release")
        except EngineError as exc:
            ok, reason, answer = False, str(exc), None
        else:
            ok, reason, answer = run.ok, run.reason, run.answer
        after = await self._poller.poll()
        readings = () if after.stale else after.ranks
        if ok and before.ranks and not readings:
            reason = f"not measured, as no reading came after it: {after.engine.hint or after.engine.state}"
        deltas = freed(before.ranks, readings)
        freed_bytes, freed_components = total(deltas)
        result = _result(order.remedy, "done" if ok else "failed", reason=reason)
        result = replace(
            result,
            seconds=time.monotonic() - started,
            freed_bytes=freed_bytes,
            freed_components=freed_components,
            ranks=deltas,
        )
        self._record(order, result)
        return Measured(result, before.ranks, readings, answer)

    async def _before(self, order: _Order) -> Report:
        """A reading of now; the last one if it was taken just before, as on the policy's behalf it was.

        Raises:
            NotAvailable: The engine is not there to be asked. That is recorded as a failed reset.
        """
        report = self._poller.current()
        age = report.age_seconds
        # What is asked for now may be refused for the requests of this very moment (reset_mm_cache before 0.14).
        if order.mode == "now" or report.stale or age is None or age > JUST_BEFORE_SECONDS:
            report = await self._poller.poll()
        state = report.engine.state
        if state in {"down", "starting", "unresponsive"}:
            reason = f"the engine is {state}" + (f": {report.engine.hint}" if report.engine.hint else "")
            self._record(order, _result(order.remedy, "failed", reason=reason))
            raise NotAvailable(reason)
        return replace(report, ranks=()) if report.stale else report

    def _record(self, order: _Order, result: RemedyResult) -> None:
        self._observer.remedy_ended(result, order.trigger)
        kind: Literal["refusal", "reset"] = "refusal" if result.outcome == "refused" else "reset"
        summary = f"{result.remedy} {result.outcome}"
        if result.outcome == "done" and result.freed_bytes is not None:
            word = "freed" if result.freed_bytes >= 0 else "while use grew by"
            summary += f", {word} {mib(abs(result.freed_bytes))} MiB in {result.seconds:.2f} s"
        if result.reason:
            summary += f": {result.reason}"
        self._history.record(kind, summary, trigger=order.trigger, rule=order.rule, result=result)
        log.info("%s (%s)", summary, order.rule or order.trigger)


def _result(remedy: Remedy, outcome: Outcome, *, reason: str | None) -> RemedyResult:
    return RemedyResult(remedy=remedy.name, outcome=outcome, reason=reason, frees=remedy.frees, spares=remedy.spares)


def _relief(rule: Rule, measured: Measured) -> int | None:
    """What the remedy freed of what the rule watches, in bytes; ``None`` where that was not measured."""
    if rule.signal == "encoder_cache_bytes":
        return measured.result.freed_components.encoder_cache_bytes
    if rule.signal.startswith("host_"):
        before, after = host_used(measured.before), host_used(measured.after)
        return None if before is None or after is None else before - after
    return measured.result.freed_bytes
