"""The policy as operators write it, in a file, a variable or a ``PUT /policy``. Pure."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, Field

from highwater.policy.rules import FROZEN, Rule
from highwater.readings.policy import PolicyMode


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
