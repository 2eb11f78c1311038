"""The policy's rules as operators write them, in a file, a variable or a ``PUT /policy``: validated, with defaults."""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from highwater.policy.rules import ALL_REMEDIES, FALLING_SIGNALS, MIN_GAIN_BYTES, RATIO_SIGNALS, SIGNAL_REMEDIES, Rule
from highwater.readings import PolicyMode

Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
_FROZEN = ConfigDict(frozen=True, extra="forbid")


class RuleSettings(BaseModel):
    """One policy rule; see ``docs/policy.md``."""

    model_config = _FROZEN

    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="unique name")
    signal: str = Field(description="what is watched")
    high_water: Finite | None = Field(
        None,
        description="the rule acts at this value or beyond; unset, with device_free_bytes: derived for each rank",
    )
    low_water: Finite | None = Field(
        None, description="the rule is satisfied at this value or better; unset as high_water"
    )
    sustain_seconds: Finite = Field(0.0, ge=0, le=86400, description="how long at high water first")
    cooldown_seconds: Finite = Field(
        60.0, ge=0, le=86400, description="rest after a relief that did not reach low water"
    )
    min_gain_bytes: int = Field(
        MIN_GAIN_BYTES, ge=0, description="a remedy runs where it can give that much, or all that is missing"
    )
    remedies: tuple[str, ...] = Field(default=(), description="in this order; unset: those that lower the signal")

    @field_validator("signal")
    @classmethod
    def _known_signal(cls, value: str) -> str:
        if value == "kv_cache_usage_ratio":
            raise ValueError(
                "is no longer a signal: cached blocks that no request uses do not count in it, so that no reset can "
                "lower it. Remove the rule; the figure stays in GET /memory and in the metrics"
            )
        if value not in SIGNAL_REMEDIES:
            raise ValueError(f"is not a signal; allowed: {', '.join(SIGNAL_REMEDIES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.high_water is None or self.low_water is None:
            if self.high_water is not None or self.low_water is not None:
                raise ValueError("high_water and low_water must be given both, or neither")
            if self.signal != "device_free_bytes":
                raise ValueError(f"high_water and low_water are required for {self.signal}")
            return self
        if self.signal in FALLING_SIGNALS:
            if self.low_water <= self.high_water:
                raise ValueError(f"low_water must be over high_water for {self.signal}: less is worse there")
        elif self.low_water >= self.high_water:
            raise ValueError("low_water must be under high_water")
        if self.signal in RATIO_SIGNALS and not all(0 <= water <= 1 for water in (self.high_water, self.low_water)):
            raise ValueError(f"high_water and low_water of {self.signal} are ratios from 0 to 1")
        if min(self.high_water, self.low_water) < 0:
            raise ValueError(f"high_water and low_water of {self.signal} are bytes and never negative")
        return self

    @model_validator(mode="after")
    def _able_remedies(self) -> Self:
        for remedy in self.remedies:
            if remedy not in ALL_REMEDIES:
                raise ValueError(f"remedies: {remedy!r} is not a remedy; allowed: {', '.join(ALL_REMEDIES)}")
            if self.remedies.count(remedy) > 1:
                raise ValueError(f"remedies: {remedy!r} is named more than once")
        if not (self.remedies or SIGNAL_REMEDIES[self.signal]):
            raise ValueError(
                f"remedies must be named for {self.signal}: what frees host memory costs cache hits or holds requests"
            )
        return self

    def rule(self) -> Rule:
        """The rule as the policy takes it."""
        return Rule(**{**self.model_dump(), "remedies": self.remedies or SIGNAL_REMEDIES[self.signal]})


def _unique_names(rules: tuple[RuleSettings, ...]) -> tuple[RuleSettings, ...]:
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rule names must be unique; more than once: {', '.join(twice)}")
    return rules


UniqueRules: TypeAlias = Annotated[tuple[RuleSettings, ...], Field(max_length=32), AfterValidator(_unique_names)]

DEFAULT_RULES = (
    # Without waters: those that follow from the engine's own plan, rank by rank (docs/policy.md).
    RuleSettings(name="device", signal="device_free_bytes"),
)


class PolicySettings(BaseModel):
    """Settings of the policy."""

    model_config = _FROZEN

    mode: PolicyMode = Field("act", description="act: run remedies; observe: decide and record only")
    rules: UniqueRules = Field(DEFAULT_RULES, description="the rules, as a JSON list")

    def changed(self, change: PolicyChange) -> PolicySettings:
        """The policy with the change made."""
        given = {name: value for name, value in change if value is not None}
        return self.model_copy(update=given)


class PolicyChange(BaseModel):
    """The body of ``PUT /policy``: fields that are left out stay as they are."""

    model_config = _FROZEN

    mode: PolicyMode | None = None
    rules: UniqueRules | None = None
