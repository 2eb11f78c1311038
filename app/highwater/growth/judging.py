"""The verdict on a series, from its floors. Pure; no I/O, no clock.

::

    too few floors ────────────────────────────────► not known
    a straight rise, within a bound of its own ────► plateau, with the bound
    a straight rise, or a leak that was found before
      ├─ the newest floors do not follow it ───────► as below
      ├─ it was found two floors ago too ──────────► leak
      └─ else ─────────────────────────────────────► not known: it rises
    one step ► step; levelled off after a growth ► plateau; a trend ► not known; else ► flat

A leak thus needs more evidence to begin than to stay, and only floors that contradict it end it: the verdict does not
flap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from highwater.growth.leak import (
    MAX_BINS,
    MIN_FLOORS,
    MIN_SECONDS,
    SHARE_TO_BEGIN,
    SHARE_TO_STAY,
    Rise,
    end_of,
    find_rise,
    follows,
    kendall,
    start_of,
)
from highwater.growth.series import (
    REPEAT_SECONDS,
    SCALES,
    WINDOW_SECONDS,
    Bound,
    Floor,
    Happening,
    Measured,
    Scale,
    SeriesKey,
    binned,
    of_equal_work,
)
from highwater.growth.words import DRIVER_TITLES, amount_text, rate_text
from highwater.model.growth import GrowthGround, GrowthKind, GrowthRate, GrowthUnit, SeriesGrowth, seconds_until
from highwater.model.units import HOUR_SECONDS, MIB, span_text

# The floors of a start: weights are loaded, and caches, heaps and kernels find their sizes.
WARM_UP_FLOORS: Final = 3
BETWEEN_REQUESTS: Final = f"after each burst of requests, and every {REPEAT_SECONDS:.0f} s while no request comes"
MIN_JUDGED: Final = 6
# So long a load is watched before a series is said not to grow under it.
MIN_LEVEL_SECONDS: Final = 1200.0
# A rise that was found so many floors ago as well is confirmed.
CONFIRMING_FLOORS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step between two floors, and the event nearest to it; ``None`` where none is known."""

    size: float
    after: Floor
    until: Floor
    what: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict and its evidence.

    Attributes:
        why: Of ``not_known``.
        grown: From the first floors that count to the last.
        floors: How many count, of a leak those of its window; ``window_seconds``: from the first to the last of them.
        since: When the verdict changed to this one, in Unix seconds.
        bound: Of a ``plateau``; ``None`` where it levelled off and no bound is known.
    """

    kind: GrowthKind
    why: str = ""
    ground: GrowthGround = "idle_floors"
    value: float | None = None
    grown: float | None = None
    floors: int = 0
    window_seconds: float = 0.0
    since: float | None = None
    leak: Rise | None = None
    bound: Bound | None = None
    step: Step | None = None


def judge(
    floors: Sequence[Floor],
    *,
    unit: GrowthUnit = "bytes",
    ground: GrowthGround = "idle_floors",
    bounds: Sequence[Bound] = (),
    happenings: Sequence[Happening] = (),
    before: Judgement | None = None,
    warm_up: int = WARM_UP_FLOORS,
    taken: str = BETWEEN_REQUESTS,
) -> Judgement:
    """Return the verdict on all floors of one process's life, oldest first, given the one before.

    The first ``warm_up`` floors do not count; ``taken`` says when there is another, for who waits for a verdict.
    """
    scale = SCALES[unit, ground]
    counted = of_equal_work(floors[warm_up:]) if scale.is_loaded else floors[warm_up:]
    fixed = [bound.from_start(floors[0].value) for bound in bounds] if floors else []
    if len(counted) < MIN_JUDGED:
        so_far = f"{len(counted)} of {MIN_JUDGED} floors so far, the first {warm_up} of a start not counted"
        verdict = Judgement(kind="not_known", why=f"{so_far}; one is taken {taken}")
    else:
        verdict = _verdict(counted, scale, fixed, happenings, before)
    values = [floor.value for floor in counted]
    window_seconds = counted[-1].at - counted[0].at if counted else 0.0
    since = floors[-1].wall if floors else None
    if before is not None and before.kind == verdict.kind:
        since = before.since
    return replace(
        verdict,
        ground=ground,
        value=floors[-1].value if floors else None,
        grown=end_of(values) - start_of(values) if values else None,
        floors=len(counted) if verdict.leak is None else verdict.leak.floors,
        window_seconds=window_seconds if verdict.leak is None else verdict.leak.window_seconds,
        since=since,
    )


def _verdict(
    floors: Sequence[Floor],
    scale: Scale,
    bounds: Sequence[Bound],
    happenings: Sequence[Happening],
    before: Judgement | None,
) -> Judgement:
    known = before.leak if before is not None and before.kind == "leak" else None
    rise = find_rise(floors, scale, happenings)
    bound = None
    if rise is not None:
        drivers = {rise.driver, *rise.also}
        if "request" in drivers or "image" not in rise.lines:  # a request without an image has tokens too
            drivers -= {"1k_tokens"}
        within = (one for one in bounds if is_within(one, floors[-1].value, scale))
        bound = _lowest(one for one in within if not one.drivers or one.drivers & drivers)
    if rise is not None and bound is not None:
        if scale.is_loaded and bound.drivers and {rise.driver, *rise.also} - bound.drivers:
            return Judgement(kind="not_known", why=f"it leaks, or is on its way to {bound.what}: idle floors settle it")
        return Judgement(kind="plateau", bound=bound)
    leak = known if rise is None else rise
    if rise is not None and known is not None and known.driver in rise.also:
        # The known driver stays as long as it explains the rise as well as any.
        also = tuple(name for name in (rise.driver, *rise.also) if name != known.driver)
        leak = replace(rise, driver=known.driver, also=also)
    if leak is None or not follows(leak, floors, scale, share=SHARE_TO_BEGIN if known is None else SHARE_TO_STAY):
        return _other(floors, scale, bounds, happenings)
    if known is not None or find_rise(floors[:-CONFIRMING_FLOORS], scale, happenings) is not None:
        return Judgement(kind="leak", leak=leak)
    return Judgement(kind="not_known", why="it rises straight, and a few more floors have to confirm that")


def _lowest(bounds: Iterable[Bound]) -> Bound | None:
    return min(bounds, key=lambda bound: bound.limit, default=None)


def _other(
    floors: Sequence[Floor], scale: Scale, bounds: Sequence[Bound], happenings: Sequence[Happening]
) -> Judgement:
    if scale.is_loaded and (floors[-1].at - floors[0].at < MIN_LEVEL_SECONDS or has_load_fallen(floors)):
        return Judgement(kind="not_known", why=_why_open(floors, scale))
    step = find_step(floors, scale, happenings)
    if step is not None:
        return Judgement(kind="step", step=step)
    if not has_trend(floors, scale):
        return Judgement(kind="flat")
    within = [bound for bound in bounds if is_within(bound, floors[-1].value, scale)]
    if has_levelled_off(binned(floors, MAX_BINS), scale) or any(not bound.drivers for bound in within):
        return Judgement(kind="plateau", bound=_lowest(within))
    return Judgement(kind="not_known", why=_why_open(floors, scale))


def _why_open(floors: Sequence[Floor], scale: Scale) -> str:
    seconds = floors[-1].at - floors[0].at
    if scale.is_loaded:
        return (
            f"it {'rises' if has_trend(floors, scale) else 'does not rise'} in {span_text(seconds)} of load so far; to "
            "tell a leak from a warm-up or the load takes growth by half, an even load for an hour, or idle floors"
        )
    if len(floors) < MIN_FLOORS or seconds < MIN_SECONDS:
        return (
            f"it rises, and {len(floors)} floors over {seconds:.0f} s are too few to tell a leak from a warm-up; "
            f"{MIN_FLOORS} over {MIN_SECONDS:.0f} s settle it"
        )
    return (
        "it rises, and not straight: with the load, in steps or ever more slowly; some hours more, or a time of less "
        "load, settle it"
    )


# --- one step, and a rise that levels off ---

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


def find_step(floors: Sequence[Floor], scale: Scale, happenings: Sequence[Happening]) -> Step | None:
    """``None`` where no single step makes up nearly all growth."""
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
    what = max(between).what if between else None
    if not between:
        tokens = [
            (two.tokens - one.tokens) / (two.requests - one.requests)
            if two.requests > one.requests and two.tokens >= one.tokens
            else None
            for one, two in pairwise(floors)
        ]
        largest, earlier = tokens[at - 1], [each for each in tokens[: at - 1] if each is not None]
        if largest is not None and earlier and largest > 1.5 * max(earlier):
            what = f"requests of a new largest size ({largest:,.0f} tokens each)"
    return Step(size=size, after=after, until=until, what=what)


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


# --- as it is reported ---

_NOTABLE_BYTES: Final = 64 * MIB
# An exhaustion that is further away gets no date.
_HORIZON_SECONDS: Final = 366 * 86_400.0
_BY_WORK: Final = (
    f" (by the lowest value of each {WINDOW_SECONDS:.0f} s with as many requests, for lack of idle floors)"
)
_OVER: Final = "its process has ended, so that no floor is added"
_TOO_SOON: Final = "its floors were too few, or rose in too many ways, for a verdict"
_ALIKE: Final = "; requests that each hold more bytes, such as larger images, look the same"


def series_growth(
    key: SeriesKey, judgement: Judgement, *, measured: Measured | None, now: float, is_over: bool
) -> SeriesGrowth:
    """Return the verdict as it is reported at a wall time; ``measured`` has the limit of a series that was measured."""
    leak, bound, step = judgement.leak, judgement.bound, judgement.step
    room = None if measured is None else measured.room
    hourly = None if leak is None else leak.lines.get("hour")
    pace = None if hourly is None else hourly.slope / HOUR_SECONDS
    seconds = None if is_over else seconds_until(room, pace, slowest=0.0, horizon=_HORIZON_SECONDS)
    exhausted_at = None if seconds is None else now + seconds
    rate = None
    if leak is not None:
        line, hours = leak.line, None if hourly is None else hourly.slope
        rate = GrowthRate(
            driver=leak.driver, per_driver=line.slope, low=line.low, high=line.high, per_hour=hours, also=leak.also
        )
    # By design, or by next to nothing, it needs no advice.
    is_growing = judgement.kind != "flat" and bound is None and (judgement.grown or 0.0) >= _NOTABLE_BYTES
    if is_over and judgement.kind == "not_known":  # what would settle it comes too late
        text = f"{_TOO_SOON}; {_OVER}"
    else:
        by_work = _BY_WORK if judgement.ground == "equal_work" else ""
        text = f"{_clause(key, judgement, rate, is_over=is_over)}{by_work}{f'; {_OVER}' if is_over else ''}"
    return SeriesGrowth(
        series=key.name,
        owner=key.owner,
        measure=key.measure,
        place=key.place,
        unit=key.unit,
        verdict=judgement.kind,
        text=text,
        ground=judgement.ground,
        value=judgement.value,
        grown=judgement.grown,
        rate=rate,
        bound=None if bound is None else bound.limit,
        bound_by=None if bound is None else bound.what,
        step=None if step is None else step.size,
        step_at=None if step is None else step.until.wall,
        step_by=None if step is None else step.what,
        advice=None if measured is None or is_over or not is_growing else measured.advice,
        exhausted_at=exhausted_at,
        limit_by=measured.limit_by if measured is not None and exhausted_at is not None else None,
        floors=judgement.floors,
        window_seconds=judgement.window_seconds,
        since=judgement.since,
        is_over=is_over,
    )


def _clause(key: SeriesKey, judgement: Judgement, rate: GrowthRate | None, *, is_over: bool) -> str:
    """Return the verdict without the series' name; where its process has ended, in the past tense."""
    kind, leak, step, bound = judgement.kind, judgement.leak, judgement.step, judgement.bound
    value, grown = amount_text(judgement.value, key.unit), amount_text(judgement.grown, key.unit, signed=True)
    if leak is not None and rate is not None:
        also = ", ".join(f"per {DRIVER_TITLES[name]}" for name in leak.also)
        return (
            f"it {'leaked' if is_over else 'leaks'} {rate_text(rate, key.unit)}, by {judgement.floors} floors over "
            f"{span_text(judgement.window_seconds)}{f'; it cannot be told from growth {also}' if also else ''}"
            f"{_ALIKE if judgement.ground == 'equal_work' else ''}"
        )
    if step is not None:
        cause = "with no known event near it" if step.what is None else f"at: {step.what}"
        moves = "did" if is_over else "does"
        return f"it made one step of {amount_text(step.size, key.unit)}, {cause}, and {moves} not move otherwise"
    if kind == "plateau" and bound is None:
        return f"it grew by {grown} and {'had' if is_over else 'has'} levelled off at {value}"
    if bound is not None:
        grows, so_far = ("grew", "in all") if is_over else ("grows", "so far")
        return f"it {grows} by design, up to {amount_text(bound.limit, key.unit)} ({bound.what}): {grown} {so_far}"
    if kind == "flat":
        window = span_text(judgement.window_seconds)
        return f"it {'moved' if is_over else 'moves'} by {grown} in {window}, without a trend"
    return judgement.why
