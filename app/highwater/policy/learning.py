"""Writes into the policy's memory that an action was begun, and how it went. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from highwater.policy.core import Action
from highwater.policy.gains import freed, possible_gain
from highwater.policy.memory import LastRun, LifeMemory, RuleMemory, Wait
from highwater.policy.pressure import Facts, pressures
from highwater.readings.policy import RankFreed
from highwater.readings.rank import RankReading
from highwater.readings.remedy import RemedyResult
from highwater.readings.report import Report

INEFFECTIVE_SECONDS: Final = 3600.0
# A refusal that could not be foreseen has a passing cause: requests that would not end, another caller's remedy.
REFUSED_SECONDS: Final = 60.0


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
    rule, remedy = action.rule, action.remedy
    rule_memory = memory.rules.get(rule.name, RuleMemory())
    ranks: tuple[RankFreed, ...] = ()
    freed_bytes = None
    if result.outcome in {"done", "failed"} and after:
        ranks, freed_bytes = freed(remedy, rule.signal, result, before, after)
    run = LastRun(
        at=now,
        outcome=result.outcome,
        reason=result.reason,
        freed_bytes=freed_bytes,
        ranks=ranks,
        waits=rule_memory.runs[remedy].waits if remedy in rule_memory.runs else {},
    )
    rule_memory = replace(rule_memory, runs={**rule_memory.runs, remedy: _judged(action, run, after, now)})
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
