"""One measured figure beside its goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a figure: `under` the limit, `at most` it, or `at least` it."""

    direction: Literal["under", "at most", "at least"]
    limit: float

    def verdict(self, value: float, noise: float) -> str:
        """Return whether the goal is met; nearer to it than the noise, nothing is decided."""
        if abs(value - self.limit) < noise:
            return "not decided"
        return "yes" if self.is_met(value) else "**no**"

    def is_met(self, value: float) -> bool:
        """Return whether the value is on the right side."""
        if self.direction == "under":
            return value < self.limit
        return value <= self.limit if self.direction == "at most" else value >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of docs/figures.md.

    Attributes:
        what: What was measured.
        value: The one number that the goal judges.
        unit: Of the value and the goal; empty for ratios.
        goal: `None` where the figure is only reported.
        spread: The other numbers of the same measurement, in words: never only the best one.
        method: How it was measured.
        noise: How far two measurements of the same thing lay apart. A goal nearer than that is not decided.
    """

    what: str
    value: float
    unit: str
    goal: Goal | None
    spread: str
    method: str
    noise: float = 0.0

    def row(self, *, is_short: bool = False) -> tuple[str, str, str, str]:
        """Return what, goal, measured, met; short, only the first of the other numbers."""
        spread = self.spread.partition(";")[0] if is_short else self.spread
        goal = f"{self.goal.direction} {self._with_unit(f'{self.goal.limit:g}')}" if self.goal else "none"
        verdict = self.goal.verdict(self.value, self.noise) if self.goal else ""
        return self.what, goal, f"{self._with_unit(number(self.value))} ({spread})", verdict

    def _with_unit(self, text: str) -> str:
        return f"{text} {self.unit}".rstrip()


def number(value: float) -> str:
    """Three digits that count, none of them in powers of ten."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank: a value that was really measured."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]
