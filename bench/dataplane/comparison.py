"""One line of the data plane's table: the sidecar's figure beside its peers', judged as a ratio within each round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.dataplane.proxies import NGINX, SIDECAR
from bench.figure import Goal, number

NOT_MEASURED = "not measured"
NONE = "-"


@dataclass(frozen=True, slots=True)
class Spread:
    """The rounds' values of one figure."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The one that counts."""
        return statistics.median(self.values)

    @property
    def noise(self) -> float:
        """Twice the standard error of the median, by the rounds' median distance from it.

        One round that another process spoilt moves neither. 1.48 makes a median distance a standard deviation, 1.25
        that of a mean one of a median, both for normal noise.
        """
        distance = statistics.median(abs(value - self.median) for value in self.values)
        return 2 * 1.25 * 1.48 * distance / math.sqrt(len(self.values))

    def verdict(self, goal: Goal) -> str:
        """Return whether the median meets the goal."""
        return goal.verdict(self.median, self.noise)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measurement of each proxy, one value a round, the rounds in the same order for all.

    Attributes:
        what: What was measured.
        unit: Of the values.
        goal: Of the sidecar's value over nginx's; of the value itself where `is_absolute`.
        values: By proxy.
        is_absolute: The goal is no ratio.
    """

    what: str
    unit: str
    goal: Goal | None
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    is_absolute: bool = False

    def _ratios_to_nginx(self) -> Spread | None:
        """The sidecar over nginx, round by round; None where one of them has none, or nothing to divide by."""
        own, others = self.values.get(SIDECAR), self.values.get(NGINX)
        if not own or not others or min(others) <= 0:
            return None
        return Spread(tuple(one / other for one, other in zip(own, others, strict=True)))

    def row(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return what, goal, one cell for each proxy, over nginx, met."""
        to_nginx = self._ratios_to_nginx()
        return (
            self.what,
            self._goal(),
            *(self._cell(name) for name in names),
            str(to_nginx or NONE),
            self._verdict(to_nginx),
        )

    def _goal(self) -> str:
        if self.goal is None:
            return "none"
        what = self.unit if self.is_absolute else "x nginx"
        return f"{self.goal.direction} {self.goal.limit:g} {what}"

    def _cell(self, name: str) -> str:
        values = self.values.get(name)
        return f"{number(statistics.median(values))} {self.unit}" if values else NONE

    def _verdict(self, to_nginx: Spread | None) -> str:
        if self.goal is None:
            return ""
        judged = Spread(tuple(self.values[SIDECAR])) if self.is_absolute else to_nginx
        return judged.verdict(self.goal) if judged else NOT_MEASURED
