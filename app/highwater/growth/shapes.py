"""Shapes of growth other than a leak: one step, and a rise that levels off. Pure; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from highwater.growth.floors import Bound, Floor, Happening, Scale, binned
from highwater.growth.leak import MAX_BINS, end_of, start_of
from highwater.growth.regression import kendall

# Floors on each side of a step.
MIN_SIDE: Final = 5
# The step's least share of all growth, and the most that each side moves, as a share of the step.
MIN_STEP_SHARE, MAX_SIDE_SHARE = 0.8, 0.2
# The most that the last third of the floors adds where a series has levelled off, as a share of all growth.
MAX_LAST_SHARE: Final = 0.1
MIN_LEVEL_FLOORS: Final = 12
MIN_LAST_LOAD: Final = 0.95
_MIN_LAST: Final = 6
# Growth of so many times the median distance from the middle is more than the series' own noise.
MIN_OVER_SPREAD: Final = 3.0
MIN_TREND: Final = 0.5
# A bound is passed beyond this ratio: sizes are rounded up, and an entry is added before another is evicted.
PASSED_RATIO: Final = 1.05
# How long before the floor in front of a step its cause may lie: an effect shows while idle only.
EVENT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step between two floors, and the event nearest to it; ``None`` where none is known."""

    size: float
    after: Floor
    until: Floor
    what: str | None


def find_step(floors: Sequence[Floor], scale: Scale, happenings: Sequence[Happening] = ()) -> Step | None:
    """Return the step that makes up nearly all growth; ``None`` where no single step does."""
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
    # Medians of neighbours show the same step at several places; it was made where the values rise most.
    at = max(range(max(at - 2, 1), min(at + 3, len(values))), key=lambda i: values[i] - values[i - 1])
    if min(at, len(values) - at) < MIN_SIDE:
        return None
    moved = max(abs(end_of(side) - start_of(side)) for side in (values[:at], values[at:]))
    if size < MIN_STEP_SHARE * grown or moved > MAX_SIDE_SHARE * size:
        return None
    if size < MIN_OVER_SPREAD * max(_spread(values[:at]), _spread(values[at:])):
        return None
    after, until = floors[at - 1], floors[at]
    between = [one for one in happenings if after.at - EVENT_SECONDS <= one.at <= until.at]
    what = max(between).what if between else _larger_requests(floors, at)
    return Step(size=size, after=after, until=until, what=what)


def _larger_requests(floors: Sequence[Floor], at: int) -> str | None:
    """Return that the requests before a floor had more tokens than any earlier ones; ``None`` otherwise."""
    sizes = [
        (two.tokens - one.tokens) / (two.requests - one.requests)
        if two.requests > one.requests and two.tokens >= one.tokens
        else None
        for one, two in pairwise(floors)
    ]
    mine, earlier = sizes[at - 1], [size for size in sizes[: at - 1] if size is not None]
    if mine is None or not earlier or mine <= 1.5 * max(earlier):
        return None
    return f"requests of a new largest size ({mine:,.0f} tokens each)"


def has_levelled_off(floors: Sequence[Floor], scale: Scale) -> bool:
    """Return whether a series has grown and no longer does: the last third of its floors adds next to nothing."""
    if len(floors) < MIN_LEVEL_FLOORS:
        return False
    values = [floor.value for floor in floors]
    first = len(values) - max(len(values) // 3, _MIN_LAST)
    # Where the newest floors are the densest, a third of them is a small share of the time.
    share = min(3 * (floors[-1].at - floors[first].at) / (floors[-1].at - floors[0].at), 1.0) * MAX_LAST_SHARE
    least = scale.grain if scale.is_loaded else scale.min_growth
    return abs(end_of(values[first:]) - start_of(values[first:])) <= max(
        least, share * (end_of(values) - start_of(values))
    )


def has_trend(floors: Sequence[Floor], scale: Scale) -> bool:
    """Return whether a series has risen by more than its noise."""
    values = [floor.value for floor in binned(floors, MAX_BINS)]
    grown = end_of(values) - start_of(values)
    return grown >= scale.min_growth and kendall(values, scale.grain) >= MIN_TREND


def has_load_fallen(floors: Sequence[Floor]) -> bool:
    """Return whether fewer requests ran and waited in the last quarter of windows, which may hide a growth."""
    in_flight, last = [floor.in_flight for floor in floors], len(floors) * 3 // 4
    return fmean(in_flight[last:]) < MIN_LAST_LOAD * fmean(in_flight[:last])


def is_within(bound: Bound, value: float, scale: Scale) -> bool:
    return value <= max(PASSED_RATIO * bound.limit, bound.limit + scale.min_growth)


def _spread(values: Sequence[float]) -> float:
    """Return the median distance from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)
