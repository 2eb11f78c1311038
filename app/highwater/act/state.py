"""The policy's memory of one engine life, and what an action changes in it. Times are the caller's seconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from highwater.act.pressure import Facts, Pressure, is_relieved, possible_gain, pressures
from highwater.act.rules import Rule
from highwater.model.policy import ActionOutcome, PolicyLevel, RankFreed, RulePhase
from highwater.model.rank import RankKey, RankReading
from highwater.model.remedies import UNNEEDED, Outcome, RemedyResult, Target, credit, host_used
from highwater.model.report import Report

# After this many relapses running, a release waits for the cooldown unless memory is urgently short.
MAX_RELAPSES: Final = 3
INEFFECTIVE_SECONDS: Final = 3600.0
# A refusal that could not be foreseen has a passing cause: requests that would not end, another caller's remedy.
REFUSED_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One remedy to run."""

    rule: Rule
    remedy: str
    why: str
    target: Target = UNNEEDED
    # Where it is to help: the bytes that it can give there (None: no figure), and those that count as effective.
    ranks: Mapping[RankKey, tuple[int | None, int]] = field(default_factory=dict)
    is_tidying: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """An ineffective or refused remedy's wait on one rank: until it can give so much (None: no figure), or a time."""

    figure_bytes: int | None = None
    until: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """A remedy's last run for one rule."""

    at: float  # when it ended
    outcome: Outcome
    is_effective: bool = False  # it gave what it had to on any rank
    reason: str | None = None  # why not, or what the engine reported
    freed_bytes: int | None = None  # over all ranks; None where that was not measured
    ranks: tuple[RankFreed, ...] = ()
    waits: Mapping[RankKey, Wait] = field(default_factory=dict)

    @property
    def judged(self) -> ActionOutcome:
        return "ineffective" if self.outcome == "done" and not self.is_effective else self.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReading:
    """One rank at its last fresh reading, and when the allocator's count of retries was last seen to rise."""

    level: PolicyLevel
    alloc_retries: int | None = None
    retried_at: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMemory:
    """One rule."""

    phase: RulePhase = "calm"
    since: float | None = None  # when it entered its phase
    reached_since: float | None = None  # when the signal came to high water, if it has been there ever since
    relief: tuple[str, ...] | None = None  # the remedies that the relief in progress has run; None without one
    relief_ranks: frozenset[RankKey] = frozenset()  # the ranks that called for it
    # When the last relief ended that did not reach low water, or not for long; None where it did.
    cooldown_from: float | None = None
    relapses: int = 0  # how many reliefs running began moments after a release that had helped
    runs: Mapping[str, LastRun] = field(default_factory=dict)
    ranks: Mapping[RankKey, LastReading] = field(default_factory=dict)

    def wait(self, remedy: str, key: RankKey) -> Wait | None:
        run = self.runs.get(remedy)
        return run.waits.get(key) if run is not None else None

    def ended_if_relieved(self, rule: Rule, pressures: Sequence[Pressure]) -> RuleMemory:
        """End a relief that reached low water on the ranks that called for it: it needs no cooldown."""
        needy = [pressure for pressure in pressures if pressure.key in self.relief_ranks]
        if self.relief is None or not all(is_relieved(rule, pressure) for pressure in needy):
            return self
        return replace(self, relief=None, cooldown_from=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeMemory:
    """One life of the engine."""

    life: str = ""
    rules: Mapping[str, RuleMemory] = field(default_factory=dict)
    idle_since: float | None = None  # since when no request runs or waits; None while one does, or where unknown
    is_tidied: bool = False  # this idle period has had its release
    work_done: float | None = None  # the engine's counters of work, when they were last known

    def with_idleness(self, report: Report, now: float) -> LifeMemory:
        engine = report.engine
        is_idle = not report.stale and engine.requests_running == 0 and engine.requests_waiting == 0
        # A short request may come and go between two readings; it leaves its tokens in the counters.
        has_worked = None not in {engine.work_done, self.work_done} and engine.work_done != self.work_done
        memory = replace(self, work_done=engine.work_done if engine.work_done is not None else self.work_done)
        if not is_idle:
            return replace(memory, idle_since=None, is_tidied=False)
        if has_worked:
            return replace(memory, idle_since=now, is_tidied=False)
        return memory if memory.idle_since is not None else replace(memory, idle_since=now)


# --- an action ---


def begin(memory: LifeMemory, action: Action) -> LifeMemory:
    if action.is_tidying:
        return replace(memory, is_tidied=True)
    rule_memory = memory.rules.get(action.rule.name, RuleMemory())
    rule_memory = replace(rule_memory, relief=(*(rule_memory.relief or ()), action.remedy))
    return replace(memory, rules={**memory.rules, action.rule.name: rule_memory})


def learn(
    memory: LifeMemory,
    action: Action,
    result: RemedyResult,
    *,
    before: Sequence[RankReading],
    after: Sequence[RankReading],
    seen: Report,
    facts: Facts,
    now: float,
) -> LifeMemory:
    """Remember how the action went, by the readings before and after it, if any, and the last report (``seen``).

    The memory is that with the action begun, or an empty one if the engine's life has ended meanwhile.
    """
    rule = action.rule
    rule_memory = memory.rules.get(rule.name, RuleMemory())
    last = rule_memory.runs.get(action.remedy)
    run = LastRun(at=now, outcome=result.outcome, reason=result.reason, waits={} if last is None else last.waits)
    if result.outcome in {"done", "failed"} and after:
        ranks, freed_bytes = _freed(action, result, before, after)
        run = replace(run, ranks=ranks, freed_bytes=freed_bytes)
    rule_memory = replace(rule_memory, runs={**rule_memory.runs, action.remedy: _judged(action, run, after, now)})
    if result.outcome == "observed":  # it changed nothing, and neither would the next one
        rule_memory = replace(
            rule_memory, relief=None, relapses=0, cooldown_from=rule_memory.cooldown_from if action.is_tidying else now
        )
    if not seen.stale and after:
        # By the readings right after it, or the next wave would be taken for a relief that has not helped.
        measured = {reading.key: reading for reading in (*seen.ranks, *after)}
        known = replace(seen, ranks=tuple(measured.values()))
        rule_memory = rule_memory.ended_if_relieved(rule, pressures(rule, known, facts))
    return replace(memory, rules={**memory.rules, rule.name: rule_memory})


def _judged(action: Action, run: LastRun, after: Sequence[RankReading], now: float) -> LastRun:
    given = {freed.key: freed.freed_bytes or 0 for freed in run.ranks}
    left = {reading.key: possible_gain(action.remedy, action.rule.signal, reading).size for reading in after}
    waits, effective = dict(run.waits), False
    for key, (size, required) in action.ranks.items():
        freed_bytes = given.get(key, required)  # what was not measured is taken to have helped
        if run.outcome == "done" and freed_bytes >= required:
            waits.pop(key, None)
            effective = True
        elif run.outcome == "done":
            figure = None if size is None else (left.get(key) or 0) + max(required, size - freed_bytes)
            waits[key] = Wait(figure_bytes=figure, until=now + INEFFECTIVE_SECONDS if figure is None else math.inf)
        elif run.outcome in {"refused", "observed"}:
            figure = None if size is None else size + required
            seconds = REFUSED_SECONDS if run.outcome == "refused" else INEFFECTIVE_SECONDS
            waits[key] = Wait(figure_bytes=figure, until=now + seconds)
    return replace(run, waits=waits, is_effective=effective)


def _freed(
    action: Action, result: RemedyResult, before: Sequence[RankReading], after: Sequence[RankReading]
) -> tuple[tuple[RankFreed, ...], int | None]:
    """Return what the remedy freed of the signal, by rank and in all. Ranks of one host share its memory."""
    if not action.rule.traits.is_of_host:
        credited = credit(action.remedy, before, after, result.detail)
        return credited.ranks, credited.freed_bytes or 0

    def less(was: int | None, now: int | None) -> int | None:
        return max(was - now, 0) if was is not None and now is not None else None

    earlier = {reading.key: reading.host_memory.share[0] for reading in before}
    ranks = tuple(
        RankFreed(rank=now.rank, dp_rank=now.dp_rank, freed_bytes=less(earlier[now.key], now.host_memory.share[0]))
        for now in after
        if now.key in earlier
    )
    return ranks, less(host_used(before), host_used(after)) or 0
