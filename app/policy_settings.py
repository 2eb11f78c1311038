"""The policy's rules as operators write them, in a file, a variable or a ``PUT /policy``: validated, with defaults."""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from app.policy import ACTIONS_PER_HOUR, FALLING_SIGNALS, RATIO_SIGNALS, SIGNAL_REMEDIES, PolicyMode, Rule

MIB = 1024 * 1024
_FROZEN = ConfigDict(frozen=True, extra="forbid")


class RuleSettings(BaseModel):
    """One policy rule; see ``docs/policy.md``."""

    model_config = _FROZEN

    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="unique name")
    signal: str = Field(description="what is watched")
    high_water: float = Field(allow_inf_nan=False, description="the rule acts at this value or beyond")
    low_water: float = Field(allow_inf_nan=False, description="the rule is satisfied at this value or better")
    sustain_seconds: float = Field(0.0, ge=0, le=86400, allow_inf_nan=False, description="how long at high water first")
    cooldown_seconds: float = Field(60.0, ge=0, le=86400, allow_inf_nan=False, description="rest after relief")
    min_effect_bytes: int = Field(32 * MIB, ge=0, description="a remedy that freed less is worn out for a while")
    remedies: tuple[str, ...] = Field(default=(), description="in this order; none: all that can lower the signal")

    @field_validator("signal")
    @classmethod
    def _known_signal(cls, value: str) -> str:
        if value not in SIGNAL_REMEDIES:
            raise ValueError(f"is not a signal; allowed: {', '.join(SIGNAL_REMEDIES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.signal in FALLING_SIGNALS:
            if self.low_water <= self.high_water:
                raise ValueError(f"low_water must be over high_water for {self.signal}: less is worse there")
        elif self.low_water >= self.high_water:
            raise ValueError("low_water must be under high_water")
        waters = (self.high_water, self.low_water)
        if self.signal in RATIO_SIGNALS and not all(0 <= water <= 1 for water in waters):
            raise ValueError(f"high_water and low_water of {self.signal} are ratios from 0 to 1")
        if self.signal in {"encoder_cache_bytes", "device_free_bytes"} and min(waters) < 0:
            raise ValueError(f"high_water and low_water of {self.signal} are sizes and never negative")
        if self.signal in {"device_growth_bytes", "host_growth_bytes"} and self.high_water <= 0:
            raise ValueError(f"high_water of {self.signal} must be over 0: that is where growth starts")
        return self

    @model_validator(mode="after")
    def _able_remedies(self) -> Self:
        allowed = SIGNAL_REMEDIES[self.signal]
        for remedy in self.remedies:
            if remedy not in allowed:
                raise ValueError(f"remedy {remedy!r} cannot lower {self.signal}; allowed: {', '.join(allowed)}")
            if self.remedies.count(remedy) > 1:
                raise ValueError(f"remedy {remedy!r} is there twice or more")
        return self

    def rule(self) -> Rule:
        """The rule as the policy takes it."""
        return Rule(**{**self.model_dump(), "remedies": self.remedies or SIGNAL_REMEDIES[self.signal]})


def _unique_names(rules: tuple[RuleSettings, ...]) -> tuple[RuleSettings, ...]:
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rule names must be unique; twice or more: {', '.join(twice)}")
    return rules


UniqueRules: TypeAlias = Annotated[tuple[RuleSettings, ...], Field(max_length=32), AfterValidator(_unique_names)]

DEFAULT_RULES = (
    RuleSettings(name="device", signal="device_used_ratio", high_water=0.93, low_water=0.90),
    RuleSettings(name="host", signal="host_used_ratio", high_water=0.90, low_water=0.85, sustain_seconds=15.0),
)


ActionsPerHour: TypeAlias = Annotated[int, Field(ge=0, le=3600)]


class PolicySettings(BaseModel):
    """What the governor does on its own."""

    model_config = _FROZEN

    mode: PolicyMode = Field("act", description="act: run remedies; observe: decide and record only")
    rules: UniqueRules = Field(DEFAULT_RULES, description="the rules, as a JSON list")
    max_actions_per_hour: ActionsPerHour = Field(
        ACTIONS_PER_HOUR, description="remedies that the policy may start within an hour, over all rules"
    )

    def changed(self, change: PolicyChange) -> PolicySettings:
        """The policy with the change made."""
        given = {name: value for name, value in change if value is not None}
        return self.model_copy(update=given)


class PolicyChange(BaseModel):
    """The body of ``PUT /policy``: what is left out stays as it is."""

    model_config = _FROZEN

    mode: PolicyMode | None = None
    rules: UniqueRules | None = None
    max_actions_per_hour: ActionsPerHour | None = None
