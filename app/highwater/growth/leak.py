"""Looks for a leak in a series: a straight rise that goes on, that nothing else explains. Pure; no I/O, no clock.

Of several windows, all ending at the newest floor, the longest one counts that shows all of this:

- It is long enough, in floors and in time.
- It rises to its end, and by more than the scatter about its line.
- It is straight: what slows down is a warm-up, a cache that fills, an allocator that finds its size.
- What was before it did not rise faster: a window in the tail of a curve is straight, and so is its every part.
- It comes to where the series has not been, and rises nearly wherever its driver goes on.
- The load did not rise meanwhile: a series may follow the load up, and follows it down in the evening.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, stdev
from typing import Final

from highwater.growth.floors import Floor, Happening, Scale, binned
from highwater.growth.regression import Line, kendall, theil_sen
from highwater.readings import GrowthDriver

DRIVERS: Final[tuple[GrowthDriver, ...]] = ("request", "image", "new_image", "1k_tokens", "hour")

MIN_FLOORS: Final = 12
MIN_SECONDS: Final = 240.0
MAX_BINS: Final = 24
# Of the pairs in the window's second half so many more rise than fall.
MIN_RISING: Final = 0.6
# The slope of one half over that of the other; and where the second half is slower beyond doubt.
MIN_STRAIGHT, MIN_STRAIGHT_SURELY_SLOWER = 0.8, 0.92
# Each window is that share of the one before.
NEXT_WINDOW: Final = 0.75
# Before a window the series was not much steeper where the window is so much of what is known, in time; before a
# shorter one it was much flatter.
MIN_SHARE_OF_LIFE, MAX_EARLIER_SLOPE, MAX_EARLIER_SLOPE_SHORT = 0.7, 1.3, 0.5
# The window ends above all that was before by that share of the range in which the series moved then.
MIN_ABOVE_RANGE: Final = 0.5
# Of the points at which the driver had gone on, so many have risen by that share of what the line says at least.
MIN_FOLLOWING, MIN_FOLLOWED = 0.4, 0.25
# The lower end of the slope's interval makes so many times the scatter over the window.
MIN_OVER_SCATTER: Final = 8.0
# The driver's line is closer than the next one's by so much.
CLEAR_MARGIN: Final = 0.75
# So many of the newest floors must follow a leak: by so much of it for it to be found, and by so much for it to stay.
NEWEST_FOLLOWING: Final = 8
SHARE_TO_BEGIN, SHARE_TO_STAY = 0.6, 0.35
MIN_AGAINST_SCATTER: Final = 3.0
# And so many of them end it that have fallen by that share of what had leaked.
NEWEST_FALLEN: Final = 3
MAX_FALL: Final = 0.5
# The load rose where the window's second half saw so many more requests a second than its first. It rises in hours.
MAX_LOAD_RISE, MAX_DOUBTFUL_RISE, MIN_LOAD_SECONDS = 1.04, 1.1, 1200.0
MAX_GAP: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A straight rise.

    Attributes:
        driver: What it goes along with.
        line: Value over the driver.
        also: Other drivers that explain it as well.
        lines: Value over each driver that moved.
        window: The floors.
        grown: How much, in all.
        has_load_risen: Whether the load rose meanwhile: it may be no more than that.
    """

    driver: GrowthDriver
    line: Line
    also: tuple[GrowthDriver, ...]
    lines: Mapping[GrowthDriver, Line]
    window: Sequence[Floor]
    grown: float
    has_load_risen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A leak as it was found last.

    Attributes:
        driver: What it goes along with.
        line: The series over the driver.
        also: Other drivers that explain it as well.
        hourly: The series over hours; ``None`` where that is no line.
        grown: How much, in the window.
        floors: How many floors the window had.
        window_seconds: From the first to the last.
    """

    driver: GrowthDriver
    line: Line
    also: tuple[GrowthDriver, ...]
    hourly: Line | None
    grown: float
    floors: int
    window_seconds: float


def find_rise(floors: Sequence[Floor], scale: Scale, happenings: Sequence[Happening] = ()) -> Rise | None:
    """Return the rise in the longest window that shows one; ``None`` where none does.

    Args:
        floors: Oldest first, without those of the start.
        scale: What is too little to count.
        happenings: Of them resets matter: where a series has been before one is no measure for what it is after.
    """
    last_reset = max((one.at for one in happenings if one.is_reset), default=-math.inf)
    size, has_load_risen = len(floors), False
    while size >= MIN_FLOORS:
        start = len(floors) - size
        before = [floor for floor in floors[:start] if floor.at > last_reset]
        rise = _rise(floors[start:], before, scale)
        # Where the load rose over a window, that a part of it seems even is chance; but minutes are no rhythm.
        if rise is not None and not (has_load_risen and _seconds(rise.window) >= MIN_LOAD_SECONDS):
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
    if not is_rising or _was_there_before(values, before, scale):
        return None
    lines = _lines(points)
    chosen = _driver(lines, scale)
    if chosen is None:
        return None
    driver, also = chosen
    line = lines[driver]
    reach = points[-1].progress(driver) - points[0].progress(driver)
    is_sure = line.low * reach >= max(scale.min_growth, MIN_OVER_SCATTER * line.scatter)
    is_line = _is_straight(points, driver) and _was_flatter(window, before, driver, line)
    if not (is_sure and is_line and _keeps_rising(points, driver, line)):
        return None
    return Rise(
        driver=driver,
        line=line,
        also=also,
        lines=lines,
        window=window,
        grown=grown,
        has_load_risen=_load_rose(points, is_by_hour="hour" in (driver, *also)),
    )


def _seconds(window: Sequence[Floor]) -> float:
    return window[-1].at - window[0].at


def start_of(values: Sequence[float]) -> float:
    """Return where a series begins: the median of its first three values."""
    return median(values[:3])


def end_of(values: Sequence[float]) -> float:
    """Return where it ends, likewise."""
    return median(values[-3:])


def _was_there_before(values: Sequence[float], before: Sequence[Floor], scale: Scale) -> bool:
    """Return whether the series was about as high before the window."""
    earlier = [floor.value for floor in binned(before, MAX_BINS)]
    if not earlier:
        return False
    highest = max(earlier)
    return end_of(values) <= highest + max(scale.grain, MIN_ABOVE_RANGE * (highest - min(earlier)))


def _load_rose(points: Sequence[Floor], *, is_by_hour: bool) -> bool:
    """Return whether the requests a second rose from the window's first half to its second.

    Args:
        points: The window.
        is_by_hour: The rise is as straight over time as over anything: then the load must be known not to have risen.
    """
    if _seconds(points) < MIN_LOAD_SECONDS or math.isnan(points[-1].requests):
        return False
    steps = [(later.requests - earlier.requests, later.at - earlier.at) for earlier, later in pairwise(points)]
    usual = median(seconds for _, seconds in steps)
    # Nobody knows what was done, and when, while no floor was taken.
    known = [step for step in steps if step[1] <= MAX_GAP * usual]
    half = len(known) // 2
    (earlier, error), (later, other_error) = _rate(known[:half]), _rate(known[-half:])
    if later <= MAX_LOAD_RISE * earlier:
        doubt = later * math.hypot(error, other_error) if is_by_hour else 0.0
        return later + doubt > MAX_DOUBTFUL_RISE * earlier
    return True


def _rate(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the requests a second, and how far that may be off, as a share of it."""
    rate = sum(requests for requests, _ in steps) / sum(seconds for _, seconds in steps)
    if rate <= 0:
        return 0.0, 0.0
    return rate, stdev(requests / seconds for requests, seconds in steps) / rate / math.sqrt(len(steps))


def _lines(points: Sequence[Floor]) -> dict[GrowthDriver, Line]:
    """Return the line over each driver that is known and has moved."""
    values = [floor.value for floor in points]
    lines: dict[GrowthDriver, Line] = {}
    for driver in DRIVERS:
        xs = [floor.progress(driver) for floor in points]
        line = None if any(map(math.isnan, xs)) else theil_sen(xs, values)
        if line is not None and line.slope > 0:
            lines[driver] = line
    return lines


def _driver(lines: dict[GrowthDriver, Line], scale: Scale) -> tuple[GrowthDriver, tuple[GrowthDriver, ...]] | None:
    """Return the driver whose line is the closest, and those that are as close; the hour where it is one of them."""
    if not lines:
        return None
    least = min(line.scatter for line in lines.values()) + scale.grain
    close = tuple(name for name, line in lines.items() if CLEAR_MARGIN * (line.scatter + scale.grain) < least)
    driver: GrowthDriver = "hour" if "hour" in close else min(close, key=lambda name: lines[name].scatter)
    return driver, tuple(name for name in close if name != driver)


def _is_straight(points: Sequence[Floor], driver: GrowthDriver) -> bool:
    """Return whether both halves rise alike."""
    half = len(points) // 2
    first, second = _line(points[: half + 1], driver), _line(points[half:], driver)
    if first is None or second is None or first.slope <= 0 or second.slope <= 0:
        return False
    ratio = second.slope / first.slope
    is_surely_slower = second.high < first.low and ratio < MIN_STRAIGHT_SURELY_SLOWER
    return MIN_STRAIGHT <= ratio <= 1 / MIN_STRAIGHT and not is_surely_slower


def _keeps_rising(points: Sequence[Floor], driver: GrowthDriver, line: Line) -> bool:
    """Return whether it rises nearly wherever its driver goes on: a few steps in a row may look like a line."""
    moves = [
        (later.value - earlier.value, later.progress(driver) - earlier.progress(driver))
        for earlier, later in pairwise(points)
    ]
    counted = [rise >= MIN_FOLLOWED * line.slope * driven for rise, driven in moves if driven > 0]
    return sum(counted) >= MIN_FOLLOWING * len(counted)


def _was_flatter(window: Sequence[Floor], before: Sequence[Floor], driver: GrowthDriver, line: Line) -> bool:
    """Return whether the series was flatter before, or the window is most of what is known."""
    earlier = _line(binned(before, MAX_BINS), driver)
    if earlier is None:
        return True
    is_most = _seconds(window) >= MIN_SHARE_OF_LIFE * (window[-1].at - before[0].at)
    return earlier.slope <= (MAX_EARLIER_SLOPE if is_most else MAX_EARLIER_SLOPE_SHORT) * line.slope


def _line(points: Sequence[Floor], driver: GrowthDriver) -> Line | None:
    return theil_sen([floor.progress(driver) for floor in points], [floor.value for floor in points])


def follows(leak: Leak, floors: Sequence[Floor], scale: Scale, *, share: float) -> bool:
    """Return whether the newest floors follow a leak: nothing contradicts it.

    They do not where the series fell by half of what had leaked, or rose by less than that share of what the leak's
    driver calls for. With a driver that stands nothing contradicts it.
    """
    values = [floor.value for floor in floors]
    reached, now = end_of(values[:-NEWEST_FALLEN]), end_of(values)
    if reached - now > MAX_FALL * leak.grown:
        return False
    # The end of values that rise is the last but one of them.
    newest, then = floors[-2], floors[-NEWEST_FOLLOWING - 2]
    expected = leak.line.slope * (newest.progress(leak.driver) - then.progress(leak.driver))
    if expected < max(scale.min_growth, MIN_AGAINST_SCATTER * leak.line.scatter):
        return True
    return now - end_of(values[:-NEWEST_FOLLOWING]) >= share * expected
