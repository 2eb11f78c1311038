"""The search for a leak: a straight rise that goes on, and that nothing else explains. Pure; no I/O, no clock.

Of several windows, all ending at the newest floor, the longest counts that meets all of these conditions:

- It is long enough, in floors and in time.
- It rises to its end, and by more than the scatter about its line.
- It is straight: a rise that slows down is a warm-up, a filling cache or an allocator that finds its size.
- The series did not rise faster before it: a window in the tail of a curve is straight as well.
- It reaches values that the series has not had, and rises nearly wherever its driver advances.
- The load did not rise in it: a series may follow the load up, and follows it down in the evening.

Of windows of equal work it also takes an hour, or growth that no warm-up makes, and that the requests of its first half
have ended: memory that grows with each token of long requests ends with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from highwater.growth.series import Floor, Happening, Scale, binned
from highwater.model.growth import GrowthDriver

DRIVERS: Final[tuple[GrowthDriver, ...]] = ("request", "image", "new_image", "1k_tokens", "sleep", "hour")

MIN_FLOORS: Final = 12
MIN_SECONDS: Final = 240.0
MAX_BINS: Final = 24
# The share of pairs in the window's second half that rise, less the share that falls.
MIN_RISING: Final = 0.6
# The slope of one half over that of the other; and where the intervals show that the second half is slower.
MIN_STRAIGHT, MIN_STRAIGHT_SURELY_SLOWER = 0.8, 0.92
# Each window is that share of the previous one.
NEXT_WINDOW: Final = 0.75
# Before a window that is this share of all known time the series may be somewhat steeper; before a shorter window it
# must be much flatter.
MIN_SHARE_OF_LIFE, MAX_EARLIER_SLOPE, MAX_EARLIER_SLOPE_SHORT = 0.7, 1.3, 0.5
# The window ends above all earlier values by that share of their range.
MIN_ABOVE_RANGE: Final = 0.5
# Of the points at which the driver advanced, this share rose by at least that share of what the line predicts.
MIN_FOLLOWING, MIN_FOLLOWED = 0.4, 0.25
# The lower end of the slope's interval, over the window, as a multiple of the scatter.
MIN_OVER_SCATTER: Final = 8.0
# A line whose scatter, times this, is less than the smallest scatter explains the rise as well.
CLEAR_MARGIN: Final = 0.75
# The newest floors that must follow a leak: by that share of its rate for it to be found, and by that for it to stay.
NEWEST_FOLLOWING, NEWEST_LOADED = 8, 40
SHARE_TO_BEGIN, SHARE_TO_STAY = 0.6, 0.35
MIN_AGAINST_SCATTER: Final = 3.0
# The newest floors that end a leak if they have fallen by that share of what had leaked.
NEWEST_FALLEN: Final = 3
MAX_FALL: Final = 0.5
# The load rose if the window's second half has so many times the request rate of its first. It rises in hours.
MAX_LOAD_RISE, MAX_DOUBTFUL_RISE, MIN_LOAD_SECONDS = 1.04, 1.1, 1200.0
MAX_GAP: Final = 5.0
# Under load: a shorter window must show growth of so many times the smallest, and by half of what there was. Windows
# are so close to each other that a part of a slow warm-up is straight.
MIN_LOADED_SECONDS, MIN_EARLY_GROWTHS, MIN_EARLY_SHARE = 3600.0, 16.0, 0.5
# The load explains a rise of which it may have made this share. As many requests as are under way must have ended so
# many times.
MAX_EXPLAINED, MIN_TURNOVER = 1 / 3, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A straight rise; a leak, once it is confirmed.

    Attributes:
        also: Other drivers that explain it as well as ``driver``.
        lines: Value over each driver that moved.
        has_load_risen: The load rose in the window, and may explain the rise.
    """

    driver: GrowthDriver
    also: tuple[GrowthDriver, ...]
    lines: Mapping[GrowthDriver, FittedLine]
    grown: float
    floors: int
    window_seconds: float
    has_load_risen: bool

    @property
    def line(self) -> FittedLine:
        """Value over the driver."""
        return self.lines[self.driver]


def find_rise(floors: Sequence[Floor], scale: Scale, happenings: Sequence[Happening]) -> Rise | None:
    """Return the rise in the longest window that shows one; ``None`` where none does.

    The floors are oldest first, without the start's. Values before a reset are not compared with those after it.
    """
    last_reset = max((one.at for one in happenings if one.is_reset), default=-math.inf)
    size, has_load_risen = len(floors), False
    while size >= MIN_FLOORS:
        start = len(floors) - size
        before = [floor for floor in floors[:start] if floor.at > last_reset]
        rise = _rise(floors[start:], before, scale)
        # If the load rose over a window, a part of it seems even by chance; but minutes show no rhythm.
        if rise is not None and not (has_load_risen and rise.window_seconds >= MIN_LOAD_SECONDS):
            if not rise.has_load_risen:
                return rise
            has_load_risen = True
        size = int(size * NEXT_WINDOW)
    return None


def _rise(window: Sequence[Floor], before: Sequence[Floor], scale: Scale) -> Rise | None:
    if _seconds(window) < MIN_SECONDS:
        return None
    points = binned(window, MAX_BINS)
    values = [floor.value for floor in points]
    grown = end_of(values) - start_of(values)
    is_rising = grown >= scale.min_growth and kendall(values[len(values) // 2 :], scale.grain) >= MIN_RISING
    if not is_rising or (scale.is_loaded and _is_early(points, scale)):
        return None
    had = [floor.value for floor in binned(before, MAX_BINS)]
    if had and end_of(values) <= max(had) + max(scale.grain, MIN_ABOVE_RANGE * (max(had) - min(had))):
        return None
    lines: dict[GrowthDriver, FittedLine] = {}
    for name in DRIVERS:
        is_known = not any(math.isnan(floor.progress(name)) for floor in points)
        fitted = _line(points, name) if is_known else None
        if fitted is not None and fitted.slope > 0:
            low, high = (fitted.slope + scale.widening * (end - fitted.slope) for end in (fitted.low, fitted.high))
            lines[name] = fitted._replace(low=low, high=high)
    chosen = _driver(lines, scale)
    if chosen is None:
        return None
    driver, also = chosen
    line = lines[driver]
    reach = points[-1].progress(driver) - points[0].progress(driver)
    is_sure = line.low * reach >= max(scale.min_growth, MIN_OVER_SCATTER * line.scatter)
    earlier = _line(binned(before, MAX_BINS), driver)
    is_most = not before or _seconds(window) >= MIN_SHARE_OF_LIFE * (window[-1].at - before[0].at)
    most = (MAX_EARLIER_SLOPE if is_most else MAX_EARLIER_SLOPE_SHORT) * line.slope
    is_line = _is_straight(points, driver) and (earlier is None or earlier.slope <= most)
    if not (is_sure and is_line and _keeps_rising(points, driver, line)):
        return None
    return Rise(
        driver=driver,
        also=also,
        lines=lines,
        grown=grown,
        floors=len(window),
        window_seconds=_seconds(window),
        has_load_risen=_load_rose(points, grown, scale, is_by_hour="hour" in (driver, *also)),
    )


def _seconds(window: Sequence[Floor]) -> float:
    return window[-1].at - window[0].at


def start_of(values: Sequence[float]) -> float:
    """Return the start of a series: the median of its first three values."""
    return median(values[:3])


def end_of(values: Sequence[float]) -> float:
    """Return the end of a series: the median of its last three values."""
    return median(values[-3:])


def _is_early(points: Sequence[Floor], scale: Scale) -> bool:
    """Return whether a rise under load may be a warm-up, short and small, or that of the first requests."""
    values, ended = [floor.value for floor in points], points[-1].requests - points[0].requests
    least = max(MIN_EARLY_GROWTHS * scale.min_growth, MIN_EARLY_SHARE * start_of(values))
    is_small = _seconds(points) < MIN_LOADED_SECONDS and end_of(values) - start_of(values) < least
    return is_small or not ended >= MIN_TURNOVER * fmean(one.in_flight for one in points)  # true where it is not known


def _load_rose(points: Sequence[Floor], grown: float, scale: Scale, *, is_by_hour: bool) -> bool:
    """Return whether the request rate rose from the window's first half to its second.

    A rise that is as straight over time (``is_by_hour``) as over anything else must show that the load did not rise.
    Under load no measure of it may have risen by so much that the series, in proportion, had grown by a third as much.
    """
    if (_seconds(points) < MIN_LOAD_SECONDS and not scale.is_loaded) or math.isnan(points[-1].requests):
        return False
    steps = list(pairwise(points))
    usual = median(two.at - one.at for one, two in steps)
    # While no floor was taken, the load is not known.
    known = [(one, two) for one, two in steps if two.at - one.at <= MAX_GAP * usual]
    half = len(known) // 2
    # In proportion to the series: a relief may have emptied it by the last window.
    most = 1 + MAX_EXPLAINED / 2 * grown / max(points[-1].value, grown) if scale.is_loaded else MAX_LOAD_RISE
    # By requests, images and tokens that were done, and by requests under way.
    for count in ("requests", "images", "tokens", None) if scale.is_loaded else ("requests",):
        if count is not None and math.isnan(getattr(points[-1], count)):
            continue  # this vLLM does not count it
        amounts = [
            (
                two.in_flight * (two.at - one.at) if count is None else getattr(two, count) - getattr(one, count),
                two.at - one.at,
            )
            for one, two in known
        ]
        (earlier, error), (later, other_error) = _rate(amounts[:half]), _rate(amounts[-half:])
        doubt = later * math.hypot(error, other_error) if is_by_hour and not scale.is_loaded else 0.0
        if later > most * earlier or later + doubt > max(MAX_DOUBTFUL_RISE, most) * earlier:
            return True
    return False


def _rate(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the requests a second, and the relative error of that."""
    rate = sum(requests for requests, _ in steps) / sum(seconds for _, seconds in steps)
    if rate <= 0:
        return 0.0, 0.0
    return rate, stdev(requests / seconds for requests, seconds in steps) / rate / math.sqrt(len(steps))


def _driver(
    lines: dict[GrowthDriver, FittedLine], scale: Scale
) -> tuple[GrowthDriver, tuple[GrowthDriver, ...]] | None:
    """Return the driver with the closest line, and those that are as close; of these a sleep or the hour first."""
    if not lines:
        return None
    least = min(line.scatter for line in lines.values()) + scale.grain
    margin = CLEAR_MARGIN / scale.widening
    close = tuple(name for name, line in lines.items() if margin * (line.scatter + scale.grain) < least)
    preferred: Sequence[GrowthDriver] = [name for name in ("sleep", "hour") if name in close]
    driver = preferred[0] if preferred else min(close, key=lambda name: lines[name].scatter)
    return driver, tuple(name for name in close if name != driver)


def _is_straight(points: Sequence[Floor], driver: GrowthDriver) -> bool:
    half = len(points) // 2
    first, second = _line(points[: half + 1], driver), _line(points[half:], driver)
    if first is None or second is None or first.slope <= 0 or second.slope <= 0:
        return False
    ratio = second.slope / first.slope
    is_surely_slower = second.high < first.low and ratio < MIN_STRAIGHT_SURELY_SLOWER
    return MIN_STRAIGHT <= ratio <= 1 / MIN_STRAIGHT and not is_surely_slower


def _keeps_rising(points: Sequence[Floor], driver: GrowthDriver, line: FittedLine) -> bool:
    """Return whether it rises nearly wherever its driver advances: a few steps in a row may look like a line."""
    moves = [
        (later.value - earlier.value, later.progress(driver) - earlier.progress(driver))
        for earlier, later in pairwise(points)
    ]
    counted = [rise >= MIN_FOLLOWED * line.slope * driven for rise, driven in moves if driven > 0]
    return sum(counted) >= MIN_FOLLOWING * len(counted)


def _line(points: Sequence[Floor], driver: GrowthDriver) -> FittedLine | None:
    return theil_sen([floor.progress(driver) for floor in points], [floor.value for floor in points])


def follows(leak: Rise, floors: Sequence[Floor], scale: Scale, *, share: float) -> bool:
    """Return whether the newest floors do not contradict a leak.

    They contradict it if the series fell by half of what had leaked, or rose by less than that share of what the leak's
    driver calls for. Floors between which the driver did not advance contradict nothing.
    """
    values = [floor.value for floor in floors]
    reached, now = end_of(values[:-NEWEST_FALLEN]), end_of(values)
    if reached - now > MAX_FALL * leak.grown:
        return False
    # Of rising values, `end_of` is the last but one.
    count = min(NEWEST_LOADED if scale.is_loaded else NEWEST_FOLLOWING, len(floors) - 3)
    newest, then = floors[-2], floors[-count - 2]
    expected = leak.line.slope * (newest.progress(leak.driver) - then.progress(leak.driver))
    if expected < max(scale.min_growth, MIN_AGAINST_SCATTER * scale.widening * leak.line.scatter):
        return True
    return now - end_of(values[:-count]) >= share * expected


# --- robust lines through few points ---
#
# Theil and Sen's slope, with the interval that Kendall's statistic gives it. Up to a third of the points may be
# outliers (Sen, *Estimates of the regression coefficient based on Kendall's tau*, 1968). No library: the sidecar has
# none, and 32 points make 496 pairs.

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


def kendall(ys: Sequence[float], grain: float) -> float:
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
