"""The pure policy: a rule, what is remembered of it, a reading and a time go in; a decision comes out.

No I/O, no clock, no logging, no asyncio. The governor carries decisions out and tells how they went.

::

    below ──(at or over high water for sustain_seconds)──► above ──► acting ──┐
      ▲                                                      ▲                │ measured after each remedy
      │                                                      ├── not enough ──┤
      └── cooldown over ── cooling ◄── below low water ──────┼────────────────┤
                                                             │                └──► futile: every remedy is worn out
                                                             └── backoff over, or the signal has moved ──┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from app.attribution import host_ratio, host_share, host_used, rank_key
from app.readings import UNNEEDED, Outcome, RankFreed, RankReading, Report, RulePhase, Target

# The signals, and the remedies that can lower each: a reset that cannot help only costs cache hits.
_DEVICE = ("release", "trim_encoder_cache", "reset_encoder_cache")
_HOST = ("reset_mm_cache", "release")
SIGNAL_REMEDIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "device_used_ratio": _DEVICE,
        "device_free_bytes": _DEVICE,
        "device_growth_bytes": _DEVICE,
        "encoder_cache_bytes": ("trim_encoder_cache", "reset_encoder_cache"),
        "host_used_ratio": _HOST,
        "host_growth_bytes": _HOST,
        "kv_cache_usage_ratio": ("reset_prefix_cache",),
    }
)
# Less is worse: high water is reached from above, and low water lies over it.
FALLING_SIGNALS = frozenset({"device_free_bytes"})
RATIO_SIGNALS = frozenset({"device_used_ratio", "host_used_ratio", "kv_cache_usage_ratio"})
BACKOFF_FIRST_SECONDS = 60.0
BACKOFF_MOST_SECONDS = 3600.0
HOUR_SECONDS = 3600.0
ACTIONS_PER_HOUR = 60

PolicyMode: TypeAlias = Literal["act", "observe"]
Action: TypeAlias = Literal["none", "act", "over_budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One signal to watch and the remedies that may lower it, in the order in which they are tried.

    Attributes:
        name: Unique among the rules.
        signal: One of ``SIGNAL_REMEDIES``.
        high_water: At this value (or beyond) for ``sustain_seconds`` the rule acts.
        low_water: At this value (or better) the rule is satisfied.
        sustain_seconds: How long the signal must stay at high water first.
        cooldown_seconds: How long the rule rests once satisfied, and how long one remedy rests after it ran.
        min_effect_bytes: A remedy that freed less is not tried again until its backoff is over or the signal moved.
        remedies: Names, in order.
    """

    name: str
    signal: str
    high_water: float
    low_water: float
    sustain_seconds: float = 0.0
    cooldown_seconds: float = 60.0
    min_effect_bytes: int = 32 * 1024 * 1024
    remedies: tuple[str, ...] = ()

    def reached(self, value: float) -> bool:
        """Whether the value is at high water or beyond."""
        return value <= self.high_water if self.signal in FALLING_SIGNALS else value >= self.high_water

    def relieved(self, value: float) -> bool:
        """Whether the value is at low water or better."""
        return value >= self.low_water if self.signal in FALLING_SIGNALS else value <= self.low_water

    def moved(self, value: float, since: float) -> bool:
        """Whether the signal has got worse by a step worth trying again: half the way from low to high water."""
        step = abs(self.high_water - self.low_water) / 2
        worse = since - value if self.signal in FALLING_SIGNALS else value - since
        return step > 0 and worse >= step


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyBudget:
    """How many remedies the policy may start within an hour, over all rules.

    Attributes:
        most: So many.
        started: When the last ones were started, oldest first.
    """

    most: int = ACTIONS_PER_HOUR
    started: tuple[float, ...] = ()

    def recent(self, now: float) -> tuple[float, ...]:
        """When those of the last hour were started."""
        return tuple(at for at in self.started if now < at + HOUR_SECONDS)

    def allows(self, now: float) -> bool:
        """Whether one more may be started."""
        return len(self.recent(now)) < self.most

    def allows_from(self, now: float) -> float | None:
        """When one more may be started; ``None`` where that is never, as none are allowed."""
        recent = self.recent(now)
        if self.most == 0:
            return None
        return now if len(recent) < self.most else recent[len(recent) - self.most] + HOUR_SECONDS

    def spend(self, now: float) -> HourlyBudget:
        """The budget with one more started now."""
        return replace(self, started=(*self.recent(now), now))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a remedy did for a signal, in bytes that it freed of what the signal watches.

    Attributes:
        judged_bytes: What the remedy is judged by: of the rank that was worst, where the signal is the worst rank's.
        total_bytes: Over all ranks.
        ranks: Of each rank.
    """

    judged_bytes: int | None
    total_bytes: int | None
    ranks: tuple[RankFreed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a remedy went.

    Attributes:
        at: When it ended.
        outcome: What became of it.
        reason: Why not, or what the engine said.
        effect: What it did for the signal; ``None`` where that was not measured.
    """

    at: float
    outcome: Outcome
    reason: str | None = None
    effect: Effect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WornOut:
    """A remedy that did too little: when it may be tried again."""

    value: float
    backoff_seconds: float
    retry_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMemory:
    """What is remembered of a rule between readings. Times are the caller's seconds.

    Attributes:
        phase: The rule's state.
        since: When it entered it.
        reached_since: Since when the signal has been at high water.
        cooling_until: When the rest ends.
        trials: How each remedy went last, with the last effect that was measured.
        worn_out: The remedies that did too little, by name.
    """

    phase: RulePhase = "below"
    since: float = 0.0
    reached_since: float | None = None
    cooling_until: float = 0.0
    trials: Mapping[str, Trial] = field(default_factory=dict)
    worn_out: Mapping[str, WornOut] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now. With ``act`` the remedy to run, with ``over_budget`` the one that must wait."""

    action: Action = "none"
    remedy: str | None = None


_NOTHING = Decision()
_FRESH_BUDGET = HourlyBudget()


def decide(
    rule: Rule, memory: RuleMemory, value: float | None, now: float, budget: HourlyBudget = _FRESH_BUDGET
) -> tuple[RuleMemory, Decision]:
    """Look at one reading.

    Args:
        rule: The rule.
        memory: What is remembered of it.
        value: The signal, or ``None`` where there is no fresh reading: then nothing is done and nothing forgotten.
        now: The time, in seconds.
        budget: What may still be started in this hour.
    """
    if value is None or memory.phase == "acting":
        return memory, _NOTHING
    if memory.phase == "cooling":
        if now < memory.cooling_until:
            return memory, _NOTHING
        memory = _enter(memory, "below", now)
    if not rule.reached(value) and (memory.phase == "below" or rule.relieved(value)):
        return _calm(memory, now), _NOTHING
    if memory.phase == "below":
        since = memory.reached_since if memory.reached_since is not None else now
        memory = replace(memory, reached_since=since)
        if now - since < rule.sustain_seconds:
            return memory, _NOTHING
        memory = _enter(memory, "above", now)
    return _climb(rule, memory, value, now, budget)


def judge(rule: Rule, memory: RuleMemory, remedy: str, trial: Trial, *, value: float | None) -> RuleMemory:
    """Take in how a remedy went, and the signal after it.

    A remedy that was refused or failed, or freed less than ``min_effect_bytes``, is worn out for a while, twice as long
    each time; one that helped is forgiven, and of one that was only observed nothing is learnt. The rule then rests
    (relieved), or is above again and the next reading tries the next remedy.
    """
    now = trial.at
    worn = dict(memory.worn_out)
    if _helped(rule, trial, value):
        worn.pop(remedy, None)
    elif trial.outcome != "observed":
        before = worn.get(remedy)
        backoff = min(before.backoff_seconds * 2, BACKOFF_MOST_SECONDS) if before else BACKOFF_FIRST_SECONDS
        worn[remedy] = WornOut(
            value=value if value is not None else rule.high_water, backoff_seconds=backoff, retry_at=now + backoff
        )
    last = memory.trials.get(remedy)
    if trial.effect is None and last is not None:
        trial = replace(trial, effect=last.effect)
    memory = replace(memory, worn_out=worn, trials={**memory.trials, remedy: trial})
    if value is not None and rule.relieved(value):
        rested = replace(memory, reached_since=None, cooling_until=now + rule.cooldown_seconds)
        return _enter(rested, "cooling", now)
    return _enter(memory, "above", now)


def _climb(
    rule: Rule, memory: RuleMemory, value: float, now: float, budget: HourlyBudget
) -> tuple[RuleMemory, Decision]:
    """The first remedy in order that may run, if one may."""
    remedy = next((name for name in rule.remedies if now >= usable_from(rule, memory, name, value)), None)
    if remedy is None:
        worn_out = all(name in memory.worn_out for name in rule.remedies)
        return _enter(memory, "futile" if worn_out else "above", now), _NOTHING
    if not budget.allows(now):
        return _enter(memory, "above", now), Decision(action="over_budget", remedy=remedy)
    return _enter(memory, "acting", now), Decision(action="act", remedy=remedy)


def usable_from(rule: Rule, memory: RuleMemory, remedy: str, value: float | None) -> float:
    """From when on a remedy is neither resting after its last run nor worn out; minus infinity if it never ran."""
    trial, worn = memory.trials.get(remedy), memory.worn_out.get(remedy)
    rested = trial.at + rule.cooldown_seconds if trial is not None else -math.inf
    if worn is None or (value is not None and rule.moved(value, worn.value)):
        return rested
    return max(rested, worn.retry_at)


def _helped(rule: Rule, trial: Trial, value: float | None) -> bool:
    if trial.outcome != "done":
        return False
    # reset_prefix_cache frees blocks, never bytes: there the signal itself is the judge.
    if value is not None and rule.relieved(value):
        return True
    freed = trial.effect.judged_bytes if trial.effect is not None else None
    return freed is not None and freed >= max(rule.min_effect_bytes, 1)


def _calm(memory: RuleMemory, now: float) -> RuleMemory:
    return _enter(replace(memory, reached_since=None), "below", now)


def _enter(memory: RuleMemory, phase: RulePhase, now: float) -> RuleMemory:
    return memory if memory.phase == phase else replace(memory, phase=phase, since=now)


# --- signals ---


def _encoder_bytes(rank: RankReading) -> int | None:
    return rank.components.encoder_cache_bytes


# Signals of which each rank has its own; the worst one counts.
_OF_A_RANK: Mapping[str, Callable[[RankReading], float | None]] = MappingProxyType(
    {
        "device_used_ratio": lambda rank: rank.used_ratio,
        "device_free_bytes": lambda rank: rank.free_bytes,
        "encoder_cache_bytes": _encoder_bytes,
        "host_used_ratio": host_ratio,
    }
)
_OF_ALL: Mapping[str, Callable[[Report], float | None]] = MappingProxyType(
    {
        "device_growth_bytes": lambda report: report.growth.since_ready_bytes,
        "host_growth_bytes": lambda report: report.growth.host_since_ready_bytes,
        "kv_cache_usage_ratio": lambda report: report.engine.kv_cache_usage_ratio,
    }
)
# Where the bytes are that a remedy frees for the signal. reset_prefix_cache frees blocks: no bytes there.
_BYTES: Mapping[str, Callable[[RankReading], int | None]] = MappingProxyType(
    {
        "device_used_ratio": lambda rank: rank.used_bytes,
        "device_free_bytes": lambda rank: rank.used_bytes,
        "device_growth_bytes": lambda rank: rank.used_bytes,
        "encoder_cache_bytes": _encoder_bytes,
        "host_used_ratio": lambda rank: host_share(rank)[0],
        "host_growth_bytes": lambda rank: host_share(rank)[0],
    }
)


def signal_value(signal: str, report: Report) -> float | None:
    """The signal's value in a report: of the worst rank where it is per rank; ``None`` where it is not known."""
    if signal in _OF_ALL:
        return _OF_ALL[signal](report)
    return _worst(signal, report.ranks)[1]


def _worst(signal: str, ranks: Iterable[RankReading]) -> tuple[RankReading | None, float | None]:
    """The rank on which the signal is worst, and its value there."""
    known = [(rank, value) for rank in ranks if (value := _OF_A_RANK[signal](rank)) is not None]
    pick = min if signal in FALLING_SIGNALS else max
    return pick(known, key=lambda pair: pair[1], default=(None, None))


# --- how far a remedy goes ---


def target(rule: Rule, report: Report) -> Target:
    """How far a trim goes for a rule, on every rank: to low water on the worst one, and no further.

    Never more than the encoder cache holds there, and never less than ``min_effect_bytes``, which would count as no
    effect. A device signal's bytes are summed over the ranks where it is growth: there it is each rank's even share.
    """
    if rule.signal == "encoder_cache_bytes":
        return Target(keep_bytes=max(math.floor(rule.low_water), 0))
    if rule.signal == "device_growth_bytes":
        grown, count = report.growth.since_ready_bytes, len(report.ranks)
        need = -((math.floor(rule.low_water) - grown) // count) if grown is not None and count else 0
        there = max((_encoder_bytes(rank) or 0 for rank in report.ranks), default=0)
    elif rule.signal in {"device_used_ratio", "device_free_bytes"}:
        rank, _ = _worst(rule.signal, report.ranks)
        need = _short_bytes(rule, rank) if rank is not None else 0
        there = (_encoder_bytes(rank) or 0) if rank is not None else 0
    else:
        return UNNEEDED
    return Target(free_bytes=min(max(need, rule.min_effect_bytes), there))


def _short_bytes(rule: Rule, rank: RankReading) -> int:
    """What a rank's device would have to give back to stand at low water."""
    if rule.signal == "device_free_bytes":
        return math.ceil(rule.low_water) - (rank.free_bytes or 0)
    return (rank.used_bytes or 0) - math.floor(rule.low_water * (rank.total_bytes or 0))


# --- what a remedy did ---


def effect(signal: str, before: Sequence[RankReading], after: Sequence[RankReading]) -> Effect | None:
    """What was freed between two readings of what the signal watches; ``None`` where that cannot be measured."""
    read = _BYTES.get(signal)
    earlier = {rank_key(rank): rank for rank in before}
    pairs = [(earlier[rank_key(rank)], rank) for rank in after if rank_key(rank) in earlier]
    if read is None or not pairs:
        return None
    freed = {rank_key(now): _minus(read(was), read(now)) for was, now in pairs}
    known = [size for size in freed.values() if size is not None]
    total = sum(known) if known else None
    if signal.startswith("host_"):
        # Ranks of one host share its memory: summed, it would count as often as there are ranks.
        total = _minus(host_used(before), host_used(after))
    judged = total
    if signal in _OF_A_RANK:
        worst, _ = _worst(signal, before)
        judged = freed.get(rank_key(worst)) if worst is not None else None
    ranks = tuple(RankFreed(rank=now.rank, dp_rank=now.dp_rank, freed_bytes=freed[rank_key(now)]) for _, now in pairs)
    return Effect(judged_bytes=judged, total_bytes=total, ranks=ranks)


def _minus(was: int | None, now: int | None) -> int | None:
    return None if was is None or now is None else was - now


# --- the baseline ---


def resting_value(signal: str, baseline: Sequence[RankReading]) -> float | None:
    """The signal at rest, from the first readings after the engine became ready.

    What encoder outputs held then is taken off: the sidecar may have come to an engine that had long been at work.
    ``None`` for the signals that are 0 at rest by what they count; validation keeps their high water over that.
    """
    if signal not in {"device_used_ratio", "device_free_bytes", "host_used_ratio"}:
        return None
    return _worst(signal, map(_without_encoder_outputs, baseline))[1]


def _without_encoder_outputs(rank: RankReading) -> RankReading:
    held = _encoder_bytes(rank) or 0
    used = rank.used_bytes - held if rank.used_bytes is not None else None
    return replace(
        rank,
        used_bytes=used,
        used_ratio=used / rank.total_bytes if used is not None and rank.total_bytes else rank.used_ratio,
        free_bytes=rank.free_bytes + held if rank.free_bytes is not None else None,
    )


def baseline_problem(rule: Rule, value: float | None) -> str | None:
    """Why the rule would fire for ever: its high water lies under the engine's use at rest. ``None`` if it is fine."""
    if value is None or not rule.reached(value):
        return None
    side, better = ("at or over", "Lower") if rule.signal in FALLING_SIGNALS else ("at or under", "Raise")
    other = (
        "free memory on the host" if rule.signal.startswith("host_") else "lower the engine's --gpu-memory-utilization"
    )
    return (
        f"rule {rule.name}: high_water {rule.high_water:g} of {rule.signal} is {side} the engine's own baseline "
        f"{value:g} after start; it would fire for ever. {better} it, or {other}"
    )
