"""The policy's present state: each rule, each rank by it, and each remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, Protocol, TypeAlias

from highwater.model.rank import Ranked, RankReading
from highwater.model.units import gib_text, share_text

# The worst state of the policy's rules; `unknown`: no fresh reading, so nothing is done.
PolicyLevel: TypeAlias = Literal["calm", "short", "urgent", "held", "unknown"]
RulePhase: TypeAlias = Literal["calm", "short", "urgent", "acting", "resting", "held"]
PolicyMode: TypeAlias = Literal["act", "observe"]
# The outcome of a remedy that a rule started; `ineffective`: done, and it freed less than it had to.
ActionOutcome: TypeAlias = Literal["done", "ineffective", "refused", "failed", "observed"]
# Levels and phases as people read them.
WORDS: Final[Mapping[PolicyLevel | RulePhase, str]] = MappingProxyType(
    {
        "calm": "fine",
        "short": "short",
        "urgent": "very short",
        "acting": "giving back",
        "resting": "waiting",
        "held": "cannot act",
        "unknown": "not known",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFreed(Ranked):
    """The bytes that a remedy freed on one rank, of what it can free; never negative."""

    rank: int | None
    dp_rank: int | None
    freed_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyState:
    name: str
    unavailable: str | None = None  # why it could not run here now; `None` where nothing is known against it
    last_run_at: float | None = None  # when it ended last; `None` if it never ran for this rule in this engine's life
    last_outcome: ActionOutcome | None = None
    last_reason: str | None = None  # why it did not run, or what the engine reported
    # What it freed of what it can free, over all ranks; `last_freed_ranks`: by rank.
    last_freed_bytes: int | None = None
    last_freed_ranks: tuple[RankFreed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPressure(Ranked):
    """One rank as measured by a rule, in bytes of its device; ``None``: unknown, or the rule does not watch bytes."""

    rank: int | None
    dp_rank: int | None
    free_bytes: int | None = None
    high_free_bytes: int | None = None  # with less than that free the rule acts
    low_free_bytes: int | None = None  # with that much free the rule is satisfied
    # What is missing to `low_free_bytes` once less than `high_free_bytes` is free; else 0.
    short_bytes: int | None = None
    # What `release` could give back; `can_trim_bytes`: what `trim_encoder_cache` could.
    can_release_bytes: int | None = None
    can_trim_bytes: int | None = None
    # When it comes under `high_free_bytes` at its pace; `None` where no time to full is foretold, or it is under it.
    seconds_to_high_water: float | None = None
    note: str | None = None  # why this rank is left out, or what is odd about it


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleStatus:
    name: str
    signal: str  # what it watches; `value`: the signal on the rank that is worst off
    # `calm`; `short` or `urgent`: over high water; `acting`: a remedy runs; `resting`: after a relief that did not
    # reach low water; `held`: it does not act, see `reason`.
    phase: RulePhase
    value: float | None = None
    high_water: float | None = None  # where the rule acts, in the signal's unit; of that rank, where each has its own
    low_water: float | None = None  # where it is satisfied
    reason: str | None = None  # one sentence on why it is in this phase; `None` where it is calm
    # Why what is short is not given back now; empty where nothing is there to give back, `None` where nothing is known
    # against it. `change`: what of `reason` says what to change, so that it can act.
    hindrance: str | None = None
    change: str | None = None
    since: float | None = None  # the start of this phase, in Unix seconds; `rest_until`: the end of its cooldown
    rest_until: float | None = None
    ranks: tuple[RankPressure, ...] = ()  # each rank's own figures, for rules about device memory
    remedies: tuple[RemedyState, ...] = ()
    # Whether it is held although the engine is at work, so that an operator should look after it. On CPU the default
    # rule has nothing to watch: it is not dormant.
    is_dormant: bool = False

    @property
    def short_ranks(self) -> list[RankPressure]:
        """The ranks that are short of memory, the worst first."""
        return sorted((rank for rank in self.ranks if rank.short_bytes), key=lambda rank: -(rank.short_bytes or 0))

    def is_short(self, level: PolicyLevel) -> bool:
        """Return whether memory is short by this rule; one that is resting leaves that to the policy's ``level``."""
        return (level if self.phase == "resting" else self.phase) in {"short", "urgent", "acting"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAct:
    at: float  # when it ended, in Unix seconds
    rule: str
    remedy: str
    outcome: ActionOutcome
    why: str  # why it was run, as a clause
    freed_bytes: int | None = None  # of what it can free, over all ranks
    reached: bool = False  # whether it ended a relief: the ranks that called for it reached low water


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    mode: PolicyMode  # `act`, or `observe`: decide and record, and do nothing
    level: PolicyLevel  # that of the rule that is worst off
    summary: str  # one sentence
    rules: tuple[RuleStatus, ...] = ()
    actions_last_hour: int = 0  # remedies that it started within the last hour, over all engine lives
    acts: tuple[PolicyAct, ...] = ()  # those of the last five minutes, newest first; without any the last one

    @property
    def shown_level(self) -> PolicyLevel:
        """The level as people read it: beside a reason why no rule can act nothing is called fine."""
        is_held = self.level == "calm" and bool(self.rules) and all(rule.phase == "held" for rule in self.rules)
        return "held" if is_held else self.level


# --- signals and waters ---


@dataclass(frozen=True, slots=True)
class SignalTraits:
    """One signal, as rules know it."""

    title: str
    value: Callable[[RankReading], float | None] | None = None  # of a rank; None: it is a sum over all
    falls: bool = False  # less is worse: high water is reached from above, and low water lies over it
    is_ratio: bool = False
    is_of_host: bool = False
    is_fill: bool = False  # of a device: pressure on it can be urgent


SIGNALS: Final[Mapping[str, SignalTraits]] = MappingProxyType(
    {
        "device_free_bytes": SignalTraits("free", value=lambda reading: reading.free_bytes, falls=True, is_fill=True),
        "device_used_ratio": SignalTraits(
            "used", value=lambda reading: reading.used_ratio, is_ratio=True, is_fill=True
        ),
        "device_growth_bytes": SignalTraits("grown since ready"),
        "encoder_cache_bytes": SignalTraits(
            "encoder cache", value=lambda reading: reading.components.encoder_cache_bytes
        ),
        "host_used_ratio": SignalTraits(
            "host memory used",
            value=lambda reading: reading.host_memory.used_ratio,
            is_ratio=True,
            is_of_host=True,
        ),
        "host_growth_bytes": SignalTraits("host memory grown", is_of_host=True),
    }
)


def signal_traits(signal: str) -> SignalTraits:
    """Return a signal's traits; a sidecar of another version may have more of them than are known here."""
    return SIGNALS.get(signal) or SignalTraits(signal, is_ratio=signal.endswith("_ratio"))


def signal_title(signal: str) -> str:
    return signal_traits(signal).title


def signal_text(signal: str, value: float | None) -> str:
    return share_text(value) if signal_traits(signal).is_ratio else gib_text(value)


class _HasWaters(Protocol):
    @property
    def signal(self) -> str: ...
    @property
    def high_water(self) -> float | None: ...
    @property
    def low_water(self) -> float | None: ...


def waters_text(rule: _HasWaters) -> str:
    if rule.high_water is None or rule.low_water is None:
        return ""
    # Of what is free, a rule acts on less, and stops at more.
    acts = "acts below" if rule.high_water < rule.low_water else "acts at"
    high, low = signal_text(rule.signal, rule.high_water), signal_text(rule.signal, rule.low_water)
    return f"{acts} {high}, stops at {low}"
