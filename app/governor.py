"""The policy's side: looks at every report, and has relief carried out where a rule says so.

Deciding is the pure policy's (``policy``), doing and measuring is ``relief``'s; in between stand the rules in force,
what is remembered of each, and what of that is told.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from app.errors import NotAvailable
from app.history import History
from app.policy import (
    ACTIONS_PER_HOUR,
    HOUR_SECONDS,
    Decision,
    HourlyBudget,
    PolicyMode,
    Rule,
    RuleMemory,
    Trial,
    baseline_problem,
    decide,
    effect,
    judge,
    resting_value,
    signal_value,
    target,
    usable_from,
)
from app.poller import Poller
from app.readings import ActionBudget, Caller, PolicyStatus, RemedyState, Report, RulePhase, RuleStatus
from app.relief import Measured, Relief

# The rule in the leftmost of these phases gives the policy its state.
_URGENCY: tuple[RulePhase, ...] = ("acting", "futile", "above", "cooling", "below")
WORKING_STATES = frozenset({"ready", "paused"})

log = logging.getLogger("highwater.governor")


class Governor:
    """Watches the signals, and acts by the rules.

    Args:
        relief: Carries remedies out.
        poller: For fresh readings.
        history: Where events go.
        rules: The policy's rules.
        mode: ``act``, or ``observe``: decide and record, and do nothing.
        max_actions_per_hour: How many remedies may be started within an hour, over all rules.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        internal_error: Counts a fault of our own.
    """

    def __init__(
        self,
        relief: Relief,
        poller: Poller,
        history: History,
        *,
        rules: Sequence[Rule],
        mode: PolicyMode,
        max_actions_per_hour: int = ACTIONS_PER_HOUR,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._internal_error = internal_error
        self.rules = tuple(rules)
        self.mode = mode
        self.max_actions_per_hour = max_actions_per_hour
        self._relief = relief
        self._poller = poller
        self._history = history
        self._clock = clock
        self._wall_clock = wall_clock
        self._memories: dict[str, RuleMemory] = {}
        self._problems: dict[str, str] = {}
        # One each: what was only observed must not use up what may really be done.
        self._started: dict[PolicyMode, tuple[float, ...]] = {"act": (), "observe": ()}
        self._told_budget_at = -math.inf
        self._news = asyncio.Event()

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
                # One odd report must not end the watch; it is logged and counted, and the next one is looked at afresh.
                self._internal_error()
                log.exception("the policy failed unexpectedly")

    async def consider(self) -> None:
        """Judge the current report by every rule, and act where a rule says so."""
        self._check_baselines()
        for rule in self.rules:
            # One step for each report: the measuring poll after a remedy brings the report for the next.
            if rule not in self.rules:
                continue  # replaced while a remedy of another rule ran
            decision = self._decide(rule)
            if decision.action == "act":
                await self._act(rule, decision.remedy or "")
            elif decision.action == "over_budget":
                self._tell_budget(rule, decision.remedy or "")

    def _decide(self, rule: Rule) -> Decision:
        if self._relief.busy:
            return Decision()  # an operator's remedy is running: its effect comes first
        memory, decision = decide(rule, self._memory(rule), self._signal(rule), self._clock(), self._budget)
        self._remember(rule, memory)
        return decision

    def _signal(self, rule: Rule) -> float | None:
        """The rule's signal, ``None`` without a fresh report of a working engine: then nothing is done."""
        report = self._poller.current()
        if report.stale or report.engine.state not in WORKING_STATES:
            return None
        return signal_value(rule.signal, report)

    async def _act(self, rule: Rule, remedy: str) -> None:
        mode, unspent = self.mode, self._started[self.mode]
        self._started[mode] = self._budget.spend(self._clock()).started
        aim = target(rule, self._poller.current())
        trial = Trial(at=0.0, outcome="failed")
        try:
            measured = await self._relief.for_rule(rule.name, remedy, target=aim, observe=mode == "observe")
            trial = _trial(rule, measured)
            if measured.result.outcome == "refused" and not measured.result.held_seconds:
                self._started[mode] = unspent  # nothing was done, and no request waited for it
        except NotAvailable as exc:
            log.info("rule %s: %s", rule.name, exc)  # recorded as an event already
            self._started[mode] = unspent
            trial = replace(trial, reason=str(exc))
        finally:
            # Also when cancelled in the middle: the rule must not stay in "acting".
            if rule in self.rules:
                trial = replace(trial, at=self._clock())
                self._remember(rule, judge(rule, self._memory(rule), remedy, trial, value=self._signal(rule)))

    def _memory(self, rule: Rule) -> RuleMemory:
        return self._memories.get(rule.name, RuleMemory())

    def _remember(self, rule: Rule, memory: RuleMemory) -> None:
        was = self._memory(rule)
        self._memories[rule.name] = memory
        if was.phase != memory.phase:
            value = self._signal(rule)
            at = "" if value is None else f" at {rule.signal} {value:g}"
            self._history.record("policy", f"rule {rule.name}: {was.phase} -> {memory.phase}{at}", rule=rule.name)

    @property
    def _budget(self) -> HourlyBudget:
        return HourlyBudget(most=self.max_actions_per_hour, started=self._started[self.mode])

    def _tell_budget(self, rule: Rule, remedy: str) -> None:
        """Say that the budget is used up: once, and again when it still, or again, is after an hour."""
        now = self._clock()
        if now - self._told_budget_at < HOUR_SECONDS:
            return
        self._told_budget_at = now
        free_at = self._budget.allows_from(now)
        rest = "none is allowed" if free_at is None else f"the next may start in {free_at - now:.0f} s"
        summary = f"the budget of {self.max_actions_per_hour} actions an hour is used up: {remedy} must wait; {rest}"
        self._history.record("policy", summary, rule=rule.name)
        log.warning("rule %s: %s", rule.name, summary)

    def _check_baselines(self) -> None:
        # At rest means before any growth: the first readings after the engine became ready.
        baseline = self._poller.baseline
        for rule in self.rules:
            problem = baseline_problem(rule, resting_value(rule.signal, baseline))
            if problem is None:
                self._problems.pop(rule.name, None)
            elif self._problems.get(rule.name) != problem:
                self._problems[rule.name] = problem
                self._history.record("baseline", problem, rule=rule.name)
                log.warning("%s", problem)

    def status(self) -> PolicyStatus:
        """The policy as it stands."""
        now = self._clock()
        to_unix = self._wall_clock() - now
        statuses = tuple(self._rule_status(rule, now, to_unix) for rule in self.rules)
        phases = {status.phase for status in statuses}
        state: RulePhase = next((phase for phase in _URGENCY if phase in phases), "below")
        return PolicyStatus(state=state, mode=self.mode, rules=statuses, budget=self._budget_status(now, to_unix))

    def _rule_status(self, rule: Rule, now: float, to_unix: float) -> RuleStatus:
        memory, value = self._memory(rule), self._signal(rule)
        return RuleStatus(
            name=rule.name,
            signal=rule.signal,
            high_water=rule.high_water,
            low_water=rule.low_water,
            phase=memory.phase,
            value=value,
            since=memory.since + to_unix if memory.since else None,
            problem=self._problems.get(rule.name),
            remedies=tuple(
                _remedy_state(rule, memory, name, value, now=now, to_unix=to_unix) for name in rule.remedies
            ),
        )

    def _budget_status(self, now: float, to_unix: float) -> ActionBudget:
        budget = self._budget
        used_up, free_at = not budget.allows(now), budget.allows_from(now)
        return ActionBudget(
            max_actions_per_hour=budget.most,
            started_last_hour=len(budget.recent(now)),
            used_up=used_up,
            until=free_at + to_unix if used_up and free_at is not None else None,
        )

    def replace_policy(
        self,
        rules: Sequence[Rule],
        mode: PolicyMode,
        what: str,
        *,
        max_actions_per_hour: int | None = None,
        caller: Caller | None = None,
    ) -> None:
        """Take a new, already validated policy. What is remembered of unchanged rules stays, and what was spent.

        Args:
            rules: All of them.
            mode: ``act`` or ``observe``.
            what: The event's words.
            max_actions_per_hour: ``None`` leaves it as it is.
            caller: Who asked for it.
        """
        unchanged = {rule.name for rule in rules if rule in self.rules}
        kept = {name: memory for name, memory in self._memories.items() if name in unchanged}
        self.rules, self.mode = tuple(rules), mode
        if max_actions_per_hour is not None:
            self.max_actions_per_hour = max_actions_per_hour
        self._memories, self._problems, self._told_budget_at = kept, {}, -math.inf
        self._history.record("policy", what, caller=caller)
        self._news.set()


def _trial(rule: Rule, measured: Measured) -> Trial:
    """How a remedy went for a rule; ``at`` is the caller's to set."""
    result = measured.result
    was_run = result.outcome in {"done", "failed"}
    freed = effect(rule.signal, measured.before, measured.after) if was_run else None
    return Trial(at=0.0, outcome=result.outcome, reason=result.reason, effect=freed)


def _remedy_state(
    rule: Rule, memory: RuleMemory, name: str, value: float | None, *, now: float, to_unix: float
) -> RemedyState:
    free_at = usable_from(rule, memory, name, value)
    futile = name in memory.worn_out and now < free_at
    if memory.phase == "cooling":
        free_at = max(free_at, memory.cooling_until)
    trial = memory.trials.get(name)
    state = RemedyState(
        name=name,
        futile=futile,
        retry_at=free_at + to_unix if now < free_at else None,
    )
    if trial is None:
        return state
    freed = trial.effect
    return replace(
        state,
        last_run_at=trial.at + to_unix,
        last_outcome=trial.outcome,
        last_reason=trial.reason,
        last_freed_bytes=freed.total_bytes if freed is not None else None,
        last_freed_ranks=freed.ranks if freed is not None else (),
    )
