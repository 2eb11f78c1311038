"""Robust lines through few points: Theil and Sen's slope, with the interval that Kendall's statistic gives it. Pure.

Up to a third of the points may be outliers (Sen, *Estimates of the regression coefficient based on Kendall's tau*,
1968). No library: the sidecar has none, and 32 points make 496 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

# Of the normal distribution: 95 % lie within.
_QUANTILE: Final = 1.96
_TRIMMED: Final = 0.85


class FittedLine(NamedTuple):
    """A fitted line: its slope per unit of x, and the ends of the slope's 95 % interval.

    ``scatter`` is the mean distance of the nearest 85 % of the points from it, in y.
    """

    slope: float
    low: float
    high: float
    scatter: float


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> FittedLine | None:
    """Return the line for ``xs`` that do not fall; ``None`` for fewer than three points, or if all ``xs`` are equal."""
    count = len(xs)
    if count < 3:  # noqa: PLR2004 - a line through two points has no scatter
        return None
    slopes = sorted(
        (ys[j] - y) / (xs[j] - x)
        for i, (x, y) in enumerate(zip(xs, ys, strict=True))
        for j in range(i + 1, count)
        if xs[j] > x
    )
    if not slopes:
        return None
    slope = median(slopes)
    spread = _QUANTILE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    # Pairs without a difference in x are left out: the interval is that of the remaining ranks.
    spread *= len(slopes) / (count * (count - 1) / 2)
    low = slopes[max(int((len(slopes) - spread) / 2), 0)]
    high = slopes[min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)]
    residuals = [y - slope * x for x, y in zip(xs, ys, strict=True)]
    middle = median(residuals)
    distances = sorted(abs(residual - middle) for residual in residuals)
    nearest = distances[: max(math.ceil(count * _TRIMMED), 1)]
    return FittedLine(slope, low, high, sum(nearest) / len(nearest))


def kendall(ys: Sequence[float], grain: float = 0.0) -> float:
    """Return Kendall's statistic of values in order of time, from -1 (every pair falls) to 1 (every pair rises).

    A pair that differs by no more than ``grain`` neither rises nor falls.
    """
    count = len(ys)
    if count < 2:  # noqa: PLR2004 - no pair
        return 0.0
    score = 0
    for i, earlier in enumerate(ys):
        for later in ys[i + 1 :]:
            score += (later - earlier > grain) - (earlier - later > grain)
    return score / (count * (count - 1) / 2)
