"""Decides on every report, and has ``relief`` run the remedy that was chosen; keeps the policy in force."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Literal

from pydantic import BaseModel, ValidationError

from highwater.act.decision import Decision, decide
from highwater.act.pressure import Facts, unreachable
from highwater.act.relief import Observer, Relief, RemedyOutcome
from highwater.act.rules import PolicyChange, PolicySettings, Rule
from highwater.act.state import Action, LifeMemory, begin, learn
from highwater.act.views import rule_status, summary
from highwater.model.pace import HASTY, pace_of
from highwater.model.policy import WORDS, PolicyAct, PolicyLevel, PolicyMode, PolicyStatus
from highwater.model.remedies import RemedyResult
from highwater.model.report import Caller, Report
from highwater.model.units import HOUR_SECONDS
from highwater.process.clocks import Clocks
from highwater.process.errors import NotAvailable, NotKept, UnreachableWater, contained
from highwater.process.state_file import StateFile
from highwater.process.untrusted import sentences
from highwater.watch.history import History
from highwater.watch.poller import Poller

QUICK_SECONDS: Final = 0.2
FULL_WITHIN_SECONDS: Final = 10.0
_LOOKED_AT_SECONDS: Final = 60.0
# The least time between two events about the level; every action is an event.
LEVEL_EVENT_SECONDS: Final = 10.0
# How long an act counts as one of the last ones, and how many of them are shown.
RECENT_SECONDS: Final = 300.0
MAX_ACTS: Final = 32

log = logging.getLogger("highwater.governor")


class Governor:
    """Watches the signals, and acts by the rules.

    ``shared_cards`` returns the devices that another engine is known to use as well.
    """

    def __init__(
        self,
        relief: Relief,
        poller: Poller,
        history: History,
        *,
        rules: Sequence[Rule],
        mode: PolicyMode,
        observer: Observer,
        shared_cards: Callable[[], frozenset[str]],
        clocks: Clocks,
        internal_error: Callable[[], None],
    ) -> None:
        self._internal_error = internal_error
        self.rules = tuple(rules)
        self.mode = mode
        self._relief = relief
        self._poller = poller
        self._history = history
        self._shared_cards = shared_cards
        self._observer = observer
        self._clock, self._wall_clock = clocks.monotonic, clocks.wall
        self._memory = LifeMemory()
        self._acting: Action | None = None
        self._acts: deque[tuple[float, PolicyAct]] = deque()  # those of an hour before the last one, which stays
        self._reported: dict[tuple[str, str], float] = {}
        self._level: PolicyLevel = "calm"
        self._level_reported_at = -math.inf
        self._report_ready = asyncio.Event()

    def notice(self, report: Report) -> None:
        """Have ``run`` consider a new report. Never blocks the poller."""
        del report
        self._report_ready.set()

    def poll_interval(self, report: Report) -> float:
        """Return the seconds until the next reading is wanted; infinite where the poller's own pace will do.

        Readings are closer while less than low water is free, or a device would be full within ten seconds.
        """
        tracks = self._history.tracks(report.ranks, _LOOKED_AT_SECONDS)
        if any(
            (pace := pace_of(track, HASTY)) is not None
            and rank.free_bytes is not None
            and rank.free_bytes < pace.bytes_per_second * FULL_WITHIN_SECONDS
            for rank in report.ranks
            if (track := tracks.get(rank.key)) is not None
        ):
            return QUICK_SECONDS
        is_short = any(
            pressure.need_bytes > 0
            for view in self._decide(report, self._facts(report))[1].views
            if view.phase != "held" and view.rule.traits.is_fill
            for pressure in view.pressures
        )
        return QUICK_SECONDS if is_short else math.inf

    async def run(self) -> None:
        while True:
            await self._report_ready.wait()
            self._report_ready.clear()
            # One odd report must not end the watch.
            with contained(self._internal_error, log, "the policy failed unexpectedly"):
                await self.consider()

    async def consider(self) -> None:
        """Decide on the current report, and run at most one remedy; its measuring poll brings the next report."""
        if self._relief.busy:
            return  # an operator's remedy is running: its effect comes first
        if self._memory.life != self._poller.life.id:
            self._reported.clear()
        report = self._poller.current()
        facts = self._facts(report)
        self._memory, decision = self._decide(report, facts)
        self._report(decision, report, facts)
        if decision.action is not None:
            await self._act(decision.action)

    def _decide(self, report: Report, facts: Facts) -> tuple[LifeMemory, Decision]:
        return decide(self.rules, report, facts, self._memory, self._clock())

    def _facts(self, report: Report) -> Facts:
        life = self._poller.life
        return Facts(
            life=life.id,
            baseline=life.baseline,
            unavailable={
                name: refusal
                for name in self._named_remedies()
                if (refusal := self._relief.unavailable(name, report.engine)) is not None
            },
            encoder_is_profiled=all(reading.launch.encoder_unprofiled_by is None for reading in report.ranks),
            shared_cards=self._shared_cards(),
        )

    def _named_remedies(self) -> list[str]:
        return list(dict.fromkeys(name for rule in self.rules for name in rule.ordered_remedies))

    # --- acting ---

    async def _act(self, action: Action) -> None:
        rule, observe = action.rule, self.mode == "observe"
        log.info("rule %s: %s: %s", rule.name, action.remedy, action.why)
        self._memory, self._acting = begin(self._memory, action), action
        run = RemedyOutcome(RemedyResult(remedy=action.remedy, outcome="failed"), (), ())
        try:
            run = await self._relief.for_rule(
                rule.name, action.remedy, why=action.why, target=action.target, observe=observe
            )
        except NotAvailable as exc:
            log.info("rule %s: %s", rule.name, exc)  # recorded as an event already
            run = replace(run, result=replace(run.result, reason=str(exc)))
        finally:
            # Also when cancelled: the rule must not go on as if the remedy still ran.
            self._acting = None
            self._learn(action, run)

    def _learn(self, action: Action, run: RemedyOutcome) -> None:
        now, rule = self._clock(), action.rule
        if rule not in self.rules:
            return  # replaced meanwhile, and its memory with it
        report = self._poller.current()
        self._memory = learn(
            self._memory,
            action,
            run.result,
            before=run.before,
            after=run.after,
            seen=report,
            facts=self._facts(report),
            now=now,
        )
        memory = self._memory.rules[rule.name]
        ended = memory.runs[action.remedy]
        self._observer.policy_acted(rule.name, action.remedy, ended.judged)
        if ended.judged not in {"done", "ineffective", "failed"}:
            return
        has_reached = memory.relief is None and memory.cooldown_from is None and ended.judged == "done"
        act = PolicyAct(
            at=self._wall_clock(),
            rule=rule.name,
            remedy=action.remedy,
            outcome=ended.judged,
            why=action.why,
            freed_bytes=ended.freed_bytes,
            reached=has_reached and not action.is_tidying,
        )
        self._acts.append((now, act))
        while now - self._acts[0][0] >= HOUR_SECONDS:
            self._acts.popleft()

    # --- reporting ---

    def _report(self, decision: Decision, report: Report, facts: Facts) -> None:
        now = self._clock()
        for view in decision.views:
            if view.finding is not None:
                kind = "helpless" if view.is_helpless else "held"
                self._report_once(view.rule.name, kind, f"rule {view.rule.name}: {view.finding}", now)
        named = self._named_remedies()
        # Recorders show ranks before the engine answers, and so before it is known what it can do.
        is_known = report.engine.traits.answers and bool(report.ranks) and not report.stale
        if named and len(named) == len(facts.unavailable) and is_known:
            text = f"the policy can only observe here: {next(iter(facts.unavailable.values()))}"
            self._report_once("", "observes", text, now)
        level = decision.level
        # Nothing is known of the memory of an engine that is gone or asleep.
        if level in {"held", "unknown"}:
            return
        if level != self._level and now - self._level_reported_at >= LEVEL_EVENT_SECONDS:
            why = f": {summary(decision.views, level)}" if level != "calm" else ""
            self._history.record("policy", f"memory: {WORDS[self._level]} -> {WORDS[level]}{why}")
            self._level, self._level_reported_at = level, now

    def _report_once(self, rule: str, kind: str, text: str, now: float) -> None:
        if now - self._reported.get((rule, kind), -math.inf) < HOUR_SECONDS:
            return
        self._reported[rule, kind] = now
        self._history.record("policy", text, rule=rule or None)
        log.warning("%s", text)

    def status(self) -> PolicyStatus:
        now = self._clock()
        report = self._poller.current()
        facts = self._facts(report)
        memory, decision = self._decide(report, facts)
        recent = [act for at, act in islice(reversed(self._acts), MAX_ACTS) if now - at < RECENT_SECONDS]
        acting, to_unix = self._acting, self._wall_clock() - now
        running = self._relief.now
        doing = "waits for a remedy that runs" if running is None or running.trigger != "policy" else running.text
        views = [
            replace(view, phase="acting", reason=f"{doing}: {acting.why}", hindrance=None, cooldown_until=None)
            if acting is not None and acting.rule == view.rule
            else view
            for view in decision.views
        ]
        return PolicyStatus(
            mode=self.mode,
            level=decision.level,
            summary=summary(views, decision.level, mode=self.mode),
            rules=tuple(
                rule_status(view, memory.rules[view.rule.name], report, facts.unavailable, to_unix=to_unix)
                for view in views
            ),
            actions_last_hour=sum(now - at < HOUR_SECONDS for at, _ in self._acts),
            acts=tuple(recent) or tuple(act for _, act in islice(reversed(self._acts), 1)),
        )

    # --- changing ---

    def check(self, rules: Sequence[Rule]) -> None:
        """Check that the engine can reach the rules' waters, as far as that is known. Raises UnreachableWater."""
        report = self._poller.current()
        ranks = () if report.stale else report.ranks
        for rule in rules:
            problem = unreachable(rule, self._poller.life.baseline, ranks)
            if problem is not None:
                raise UnreachableWater(problem.text)

    def replace_policy(
        self, rules: Sequence[Rule], mode: PolicyMode, what: str, *, caller: Caller | None = None
    ) -> None:
        """Replace the policy by one that is already validated, and record ``what`` as the event.

        The memory of unchanged rules stays, unless the mode changes: what was only observed taught nothing.
        """
        unchanged = {rule.name for rule in rules if rule in self.rules and mode == self.mode}
        unchanged_memory = {name: memory for name, memory in self._memory.rules.items() if name in unchanged}
        self.rules, self.mode = tuple(rules), mode
        self._memory = replace(self._memory, rules=unchanged_memory)
        self._reported.clear()
        self._history.record("policy", what, caller=caller)
        self._report_ready.set()


# --- the policy in force ---


class _Section(BaseModel):
    configured: str
    policy: PolicySettings


class PolicyStore:
    """The policy in force: the configured one, or the one that ``PUT /policy`` put in its place.

    A change is kept in the state file, where one is configured, before it is in force; what cannot be kept is refused.
    At the next start it wins over the configuration, unless that has itself been changed since. Putting the configured
    policy back ends the change: there is nothing to keep then.
    """

    def __init__(self, file: StateFile, configured: PolicySettings) -> None:
        self.in_force = configured
        self.source: Literal["settings", "put"] = "settings"  # ``put`` while it is changed
        self.startup_notice: str | None = None  # what was done with an earlier change at the start
        self._file = file
        # What the operator configured, without defaults: a release that changes those is no other configuration.
        self._configured = hashlib.sha256(configured.model_dump_json(exclude_defaults=True).encode()).hexdigest()
        self._meant = _meaning(configured)
        self._turn = asyncio.Lock()
        section = file.read("policy")
        if section is not None:
            self.startup_notice = self._take_up(section)

    @property
    def kept_in(self) -> str | None:
        return str(self._file.path) if self.source == "put" and self._file.configured else None

    async def change(self, change: PolicyChange) -> PolicySettings:
        """Keep the change, then put it in force; a thread waits for the disk. Raises NotKept; nothing has changed."""
        async with self._turn:
            policy = self.in_force.changed(change)
            is_changed = _meaning(policy) != self._meant
            section = _Section(configured=self._configured, policy=policy).model_dump(mode="json")
            await asyncio.to_thread(self._file.write, "policy", section if is_changed else None)
            self.in_force, self.source = policy, "put" if is_changed else "settings"
            return policy

    def _take_up(self, section: dict[str, Any]) -> str:
        try:
            saved = _Section.model_validate(section)
        except ValidationError as exc:
            problems = "; ".join(sentences(exc.errors(include_url=False)))
            return f"the policy kept in {self._file.path} cannot be used, the configured one is in force: {problems}"
        if saved.configured == self._configured:
            self.in_force, self.source = saved.policy, "put"
            return f"the policy of the last PUT /policy is in force, kept in {self._file.path}"
        notice = (
            "the configured policy was changed after the last PUT /policy: it is in force, and that change was dropped"
        )
        try:
            self._file.write("policy", None)  # or it would return with an earlier configuration
        except NotKept as exc:
            return f"{notice}, but is still in the file: {exc}"
        return notice


def _meaning(policy: PolicySettings) -> PolicySettings:
    named = [rule.model_copy(update={"remedies": rule.ordered_remedies}) for rule in policy.rules]
    return policy.model_copy(update={"rules": tuple(named)})
