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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from app.attribution import host_ratio
from app.readings import Outcome, Report, RulePhase

# The signals, and the remedies that can lower each: a reset that cannot help only costs cache hits.
_DEVICE = ("release", "reset_encoder_cache")
_HOST = ("reset_mm_cache", "release")
SIGNAL_REMEDIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "device_used_ratio": _DEVICE,
        "device_free_bytes": _DEVICE,
        "device_growth_bytes": _DEVICE,
        "encoder_cache_bytes": ("reset_encoder_cache",),
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

Action: TypeAlias = Literal["none", "act"]


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
        last_run: When each remedy last ran.
        worn_out: The remedies that did too little, by name.
        last_freed: What each remedy freed when it last ran.
    """

    phase: RulePhase = "below"
    since: float = 0.0
    reached_since: float | None = None
    cooling_until: float = 0.0
    last_run: Mapping[str, float] = field(default_factory=dict)
    worn_out: Mapping[str, WornOut] = field(default_factory=dict)
    last_freed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now. With ``act``, the remedy to run."""

    action: Action = "none"
    remedy: str | None = None


_NOTHING = Decision()


def decide(rule: Rule, memory: RuleMemory, value: float | None, now: float) -> tuple[RuleMemory, Decision]:
    """Look at one reading.

    Args:
        rule: The rule.
        memory: What is remembered of it.
        value: The signal, or ``None`` where there is no fresh reading: then nothing is done and nothing forgotten.
        now: The time, in seconds.
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
    remedy = _next_remedy(rule, memory, value, now)
    if remedy is None:
        worn_out = all(name in memory.worn_out for name in rule.remedies)
        return _enter(memory, "futile" if worn_out else "above", now), _NOTHING
    return _enter(memory, "acting", now), Decision(action="act", remedy=remedy)


def judge(
    rule: Rule,
    memory: RuleMemory,
    remedy: str,
    *,
    outcome: Outcome,
    freed_bytes: int | None,
    value: float | None,
    now: float,
) -> RuleMemory:
    """Take in how a remedy went.

    A remedy that was refused or failed, or freed less than ``min_effect_bytes``, is worn out for a while, twice as long
    each time; one that helped is forgiven, and of one that was only observed nothing is learnt. The rule then rests
    (relieved), or is above again and the next reading tries the next remedy.
    """
    memory = replace(memory, last_run={**memory.last_run, remedy: now})
    # reset_prefix_cache frees blocks, never bytes: there the signal itself is the judge.
    helped = outcome == "done" and (
        (freed_bytes or 0) >= rule.min_effect_bytes or (value is not None and rule.relieved(value))
    )
    worn = dict(memory.worn_out)
    if helped:
        worn.pop(remedy, None)
    elif outcome != "observed":
        before = worn.get(remedy)
        backoff = min(before.backoff_seconds * 2, BACKOFF_MOST_SECONDS) if before else BACKOFF_FIRST_SECONDS
        worn[remedy] = WornOut(
            value=value if value is not None else rule.high_water, backoff_seconds=backoff, retry_at=now + backoff
        )
    freed = dict(memory.last_freed)
    if freed_bytes is not None:
        freed[remedy] = freed_bytes
    memory = replace(memory, worn_out=worn, last_freed=freed)
    if value is not None and rule.relieved(value):
        rested = replace(memory, reached_since=None, cooling_until=now + rule.cooldown_seconds)
        return _enter(rested, "cooling", now)
    return _enter(memory, "above", now)


def baseline_problem(rule: Rule, value: float | None) -> str | None:
    """Why the rule would fire for ever: its high water lies under the engine's use at rest. ``None`` if it is fine."""
    if value is None or not rule.reached(value):
        return None
    side = "at or over" if rule.signal in FALLING_SIGNALS else "at or under"
    return (
        f"rule {rule.name}: high_water {rule.high_water:g} of {rule.signal} is {side} the engine's own baseline "
        f"{value:g} after start; it would fire for ever. Raise it, or lower the engine's --gpu-memory-utilization"
    )


def _next_remedy(rule: Rule, memory: RuleMemory, value: float, now: float) -> str | None:
    """The first remedy that is neither resting after its last run nor worn out."""

    def usable(name: str) -> bool:
        ran_at = memory.last_run.get(name)
        if ran_at is not None and now - ran_at < rule.cooldown_seconds:
            return False
        entry = memory.worn_out.get(name)
        return entry is None or now >= entry.retry_at or rule.moved(value, entry.value)

    return next(filter(usable, rule.remedies), None)


def _calm(memory: RuleMemory, now: float) -> RuleMemory:
    return _enter(replace(memory, reached_since=None), "below", now)


def _enter(memory: RuleMemory, phase: RulePhase, now: float) -> RuleMemory:
    return memory if memory.phase == phase else replace(memory, phase=phase, since=now)


# --- signals ---


def signal_value(signal: str, report: Report) -> float | None:
    """The signal's value in a report: of the worst rank where it is per rank; ``None`` where it is not known."""
    return _SIGNALS[signal](report)


def _device_used_ratio(report: Report) -> float | None:
    return max((rank.used_ratio for rank in report.ranks if rank.used_ratio is not None), default=None)


def _device_free_bytes(report: Report) -> float | None:
    return min((rank.free_bytes for rank in report.ranks if rank.free_bytes is not None), default=None)


def _device_growth_bytes(report: Report) -> float | None:
    return report.growth.since_ready_bytes


def _encoder_cache_bytes(report: Report) -> float | None:
    sizes = (rank.components.encoder_cache_bytes for rank in report.ranks)
    return max((size for size in sizes if size is not None), default=None)


def _host_used_ratio(report: Report) -> float | None:
    return max((ratio for ratio in map(host_ratio, report.ranks) if ratio is not None), default=None)


def _host_growth_bytes(report: Report) -> float | None:
    return report.growth.host_since_ready_bytes


def _kv_cache_usage_ratio(report: Report) -> float | None:
    return report.engine.kv_cache_usage_ratio


_SIGNALS: Mapping[str, Callable[[Report], float | None]] = MappingProxyType(
    {
        "device_used_ratio": _device_used_ratio,
        "device_free_bytes": _device_free_bytes,
        "device_growth_bytes": _device_growth_bytes,
        "encoder_cache_bytes": _encoder_cache_bytes,
        "host_used_ratio": _host_used_ratio,
        "host_growth_bytes": _host_growth_bytes,
        "kv_cache_usage_ratio": _kv_cache_usage_ratio,
    }
)
