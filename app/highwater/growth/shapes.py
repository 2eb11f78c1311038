"""Shapes of growth that are no leak: one step, and a rise that levels off. Pure; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from highwater.growth.floors import Bound, Floor, Happening, Scale, binned
from highwater.growth.leak import MAX_BINS, end_of, start_of
from highwater.growth.regression import kendall

# Floors on each side of a step.
MIN_SIDE: Final = 5
# Of all growth the step makes so much, and each side of it moves by no more than that of the step.
MIN_STEP_SHARE, MAX_SIDE_SHARE = 0.8, 0.2
# Of all growth the last third of the floors makes no more than that where it has levelled off.
MAX_LAST_SHARE: Final = 0.1
MIN_LEVEL_FLOORS: Final = 12
_MIN_LAST: Final = 6
# Growth of so many times the usual distance from the middle is more than the series moves by itself.
MIN_OVER_SPREAD: Final = 3.0
MIN_TREND: Final = 0.5
# A bound counts as passed beyond so much more: sizes are rounded up, and the last entry goes in before one goes out.
PASSED_RATIO: Final = 1.05
# An event so long before the floors on both sides of a step may have made it: its effect shows at rest only.
EVENT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step.

    Attributes:
        size: How high it is.
        after: The last floor before it.
        until: The first one after it.
        what: The event nearest to it, in words; ``None`` where none is known.
    """

    size: float
    after: Floor
    until: Floor
    what: str | None


def find_step(floors: Sequence[Floor], scale: Scale, happenings: Sequence[Happening] = ()) -> Step | None:
    """Return the one step that holds the whole growth; ``None`` where no single one does."""
    values = [floor.value for floor in floors]
    if len(values) < 2 * MIN_SIDE:
        return None
    grown = end_of(values) - start_of(values)
    if grown < scale.min_growth:
        return None
    size, at = max(
        (median(values[i : i + MIN_SIDE]) - median(values[i - MIN_SIDE : i]), i)
        for i in range(MIN_SIDE, len(values) - MIN_SIDE + 1)
    )
    # Medians of neighbours make the same step from several places; where it is steepest it was made.
    at = max(range(max(at - 2, 1), min(at + 3, len(values))), key=lambda i: values[i] - values[i - 1])
    if min(at, len(values) - at) < MIN_SIDE:
        return None
    moved = max(abs(end_of(side) - start_of(side)) for side in (values[:at], values[at:]))
    if size < MIN_STEP_SHARE * grown or moved > MAX_SIDE_SHARE * size:
        return None
    if size < MIN_OVER_SPREAD * max(_spread(values[:at]), _spread(values[at:])):
        return None
    after, until = floors[at - 1], floors[at]
    return Step(size=size, after=after, until=until, what=_nearest(happenings, floors, at))


def _nearest(happenings: Sequence[Happening], floors: Sequence[Floor], at: int) -> str | None:
    """Return what happened between the floors on both sides of a step, the latest of it."""
    after, until = floors[at - 1], floors[at]
    between = [one for one in happenings if after.at - EVENT_SECONDS <= one.at <= until.at]
    if between:
        return max(between).what
    return _largest(floors, at)


def _largest(floors: Sequence[Floor], at: int) -> str | None:
    """Return that the requests between two floors were larger than any before, by their tokens; ``None`` otherwise."""
    sizes = [_tokens_a_request(one, two) for one, two in pairwise(floors)]
    mine, earlier = sizes[at - 1], [size for size in sizes[: at - 1] if size is not None]
    if mine is None or not earlier or mine <= 1.5 * max(earlier):
        return None
    return f"requests of a new largest size ({mine:,.0f} tokens each)"


def _tokens_a_request(one: Floor, two: Floor) -> float | None:
    requests = two.requests - one.requests
    return (two.tokens - one.tokens) / requests if requests > 0 and two.tokens >= one.tokens else None


def has_levelled_off(values: Sequence[float], scale: Scale) -> bool:
    """Return whether a series has grown and stands now: the last third of its floors adds next to nothing."""
    if len(values) < MIN_LEVEL_FLOORS:
        return False
    grown = end_of(values) - start_of(values)
    last = values[-max(len(values) // 3, _MIN_LAST) :]
    return abs(end_of(last) - start_of(last)) <= max(scale.min_growth, MAX_LAST_SHARE * grown)


def has_trend(floors: Sequence[Floor], scale: Scale) -> bool:
    """Return whether a series has risen by more than it moves by itself."""
    values = [floor.value for floor in binned(floors, MAX_BINS)]
    grown = end_of(values) - start_of(values)
    return grown >= scale.min_growth and kendall(values, scale.grain) >= MIN_TREND


def is_within(bound: Bound, value: float, scale: Scale) -> bool:
    """Return whether a value is what a series may have by design."""
    return value <= max(PASSED_RATIO * bound.limit, bound.limit + scale.min_growth)


def _spread(values: Sequence[float]) -> float:
    """Return the usual distance from the middle."""
    middle = median(values)
    return median(abs(value - middle) for value in values)
