"""The policy's memory of one engine life. Times are the caller's seconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from highwater.policy.pressure import Pressure, is_relieved
from highwater.policy.rules import Rule
from highwater.readings.policy import ActionOutcome, PolicyLevel, RankFreed, RulePhase
from highwater.readings.rank import RankKey
from highwater.readings.remedy import Outcome

# After this many relapses running, a release waits for the cooldown unless memory is urgently short.
MAX_RELAPSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """An ineffective or refused remedy's wait on one rank.

    It ends when the remedy can give ``figure_bytes`` (``None``: it has no figure), or at a time.
    """

    figure_bytes: int | None = None
    until: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """A remedy's last run for one rule.

    Attributes:
        at: When it ended.
        is_effective: True if it gave what it had to on any rank.
        reason: Why not, or what the engine reported.
        freed_bytes: Over all ranks; ``None`` where that was not measured.
    """

    at: float
    outcome: Outcome
    is_effective: bool = False
    reason: str | None = None
    freed_bytes: int | None = None
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
    """One rule.

    Attributes:
        since: When it entered its phase.
        reached_since: When the signal came to high water, if every fresh reading since then was there.
        relief: The remedies that the relief in progress has run; ``None`` where none is in progress.
        relief_ranks: The ranks that called for it.
        cooldown_from: When the last relief ended that did not reach low water, or not for long; ``None`` where it did.
        relapses: How many reliefs running began moments after a release that had helped.
    """

    phase: RulePhase = "calm"
    since: float | None = None
    reached_since: float | None = None
    relief: tuple[str, ...] | None = None
    relief_ranks: frozenset[RankKey] = frozenset()
    cooldown_from: float | None = None
    relapses: int = 0
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
    """One life of the engine.

    Attributes:
        idle_since: Since when no request runs or waits; ``None`` while one does, or where that is unknown.
        is_tidied: True if this idle period has had its release.
        work_done: The engine's counters of work, when they were last known.
    """

    life: str = ""
    rules: Mapping[str, RuleMemory] = field(default_factory=dict)
    idle_since: float | None = None
    is_tidied: bool = False
    work_done: float | None = None
