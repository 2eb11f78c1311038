"""A finding and the advice that comes with it: frozen values, the same for incidents and for measured loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

# likely: explains an incident by itself, or calls for a change. clue: had a part in it, or may matter. note: good to
# know.
Weight: TypeAlias = Literal["likely", "clue", "note"]
Figure: TypeAlias = int | float | str | None

WEIGHTS: Final[tuple[Weight, ...]] = ("likely", "clue", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Something to change.

    Attributes:
        setting: The exact flag, variable or call.
        change: What it does, and when it helps.
        cost: What it costs, and what it does not go together with.
    """

    setting: str
    change: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A conclusion from the numbers.

    Attributes:
        name: A word for programs.
        weight: How much it explains.
        title: A clause that can stand within a sentence.
        text: In plain words.
        figures: The numbers that it is based on; a name ends in the unit.
        advice: What can be changed.
    """

    name: str
    weight: Weight
    title: str
    text: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()


def weightiest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by weight; those of the same weight keep their order."""
    return sorted(findings, key=lambda finding: WEIGHTS.index(finding.weight))


def all_advice(findings: Iterable[Finding]) -> tuple[Advice, ...]:
    """Every piece of advice once, in the order of the findings; notes give none."""
    return tuple(dict.fromkeys(each for finding in findings if finding.weight != "note" for each in finding.advice))
