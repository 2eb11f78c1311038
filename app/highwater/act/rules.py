"""A rule of the policy: what it watches, where it acts, and which remedies it may use; validated, with defaults.

Pure; no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from highwater.model.policy import SIGNALS, PolicyMode, SignalTraits
from highwater.model.remedies import TRAITS
from highwater.model.units import MIB
from highwater.process.untrusted import masked

MIN_GAIN_BYTES = 256 * MIB

# The remedies of a rule that names none. Host memory has none: what frees it costs cache hits, so an operator must name
# it.
SIGNAL_REMEDIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {signal: tuple(name for name, remedy in TRAITS.items() if signal in remedy.lowers) for signal in SIGNALS}
)

Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
FROZEN = ConfigDict(frozen=True, extra="forbid")


class Rule(BaseModel):
    """One policy rule; see ``docs/policy.md``."""

    model_config = FROZEN

    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="unique name")
    signal: str = Field(description="what the rule watches")
    high_water: Finite | None = Field(
        None,
        description="the rule acts at this value or beyond; unset, with device_free_bytes: derived for each rank",
    )
    low_water: Finite | None = Field(
        None, description="the rule is satisfied at this value or better; unset as high_water"
    )
    sustain_seconds: Finite = Field(0.0, ge=0, le=86400, description="how long the signal must be at high water first")
    cooldown_seconds: Finite = Field(
        60.0, ge=0, le=86400, description="wait after a relief that did not reach low water"
    )
    min_gain_bytes: int = Field(
        MIN_GAIN_BYTES, ge=0, description="a remedy runs where it can give that much, or all that is missing"
    )
    remedies: tuple[str, ...] = Field(
        default=(), description="names in the order in which they are tried; unset: those that lower the signal"
    )

    @property
    def traits(self) -> SignalTraits:
        return SIGNALS[self.signal]

    @property
    def is_derived(self) -> bool:
        return self.high_water is None or self.low_water is None

    @property
    def ordered_remedies(self) -> tuple[str, ...]:
        return self.remedies or SIGNAL_REMEDIES[self.signal]

    @field_validator("signal")
    @classmethod
    def _known_signal(cls, value: str) -> str:
        if value not in SIGNALS:
            raise ValueError(f"is not a signal; allowed: {', '.join(SIGNALS)}")
        return value

    @model_validator(mode="after")
    def _consistent_waters(self) -> Self:
        if self.high_water is None or self.low_water is None:
            if self.high_water is not None or self.low_water is not None:
                raise ValueError("high_water and low_water must be given both, or neither")
            if self.signal != "device_free_bytes":
                raise ValueError(f"high_water and low_water are required for {self.signal}")
            return self
        if self.traits.falls:
            if self.low_water <= self.high_water:
                raise ValueError(f"low_water must be over high_water for {self.signal}: less is worse there")
        elif self.low_water >= self.high_water:
            raise ValueError("low_water must be under high_water")
        if self.traits.is_ratio and not all(0 <= water <= 1 for water in (self.high_water, self.low_water)):
            raise ValueError(f"high_water and low_water of {self.signal} are ratios from 0 to 1")
        if min(self.high_water, self.low_water) < 0:
            raise ValueError(f"high_water and low_water of {self.signal} are bytes and never negative")
        return self

    @model_validator(mode="after")
    def _known_remedies(self) -> Self:
        for remedy in self.remedies:
            if remedy not in TRAITS:
                raise ValueError(f"remedies: {masked(remedy)!r} is not a remedy; allowed: {', '.join(TRAITS)}")
            if self.remedies.count(remedy) > 1:
                raise ValueError(f"remedies: {remedy!r} is named more than once")
        if not self.ordered_remedies:
            raise ValueError(
                f"remedies must be named for {self.signal}: what frees host memory costs cache hits or holds requests"
            )
        return self


# --- The policy as operators write it, in a file, a variable or a ``PUT /policy``. Pure ---


def _unique_names(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rule names must be unique; more than once: {', '.join(twice)}")
    return rules


UniqueRules: TypeAlias = Annotated[tuple[Rule, ...], Field(max_length=32), AfterValidator(_unique_names)]

# Without waters: those that follow from the engine's own plan, rank by rank (docs/policy.md).
DEFAULT_RULES = (Rule(name="device", signal="device_free_bytes"),)


class PolicySettings(BaseModel):
    model_config = FROZEN

    mode: PolicyMode = Field("act", description="act: run remedies; observe: decide and record only")
    rules: UniqueRules = Field(DEFAULT_RULES, description="the rules, as a JSON list")

    def changed(self, change: PolicyChange) -> PolicySettings:
        return self.model_copy(update={name: value for name, value in change if value is not None})


class PolicyChange(BaseModel):
    """The body of ``PUT /policy``: fields that are left out stay unchanged."""

    model_config = FROZEN

    mode: PolicyMode | None = None
    rules: UniqueRules | None = None
