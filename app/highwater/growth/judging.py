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
from typing import Final

from highwater.growth.floors import REPEAT_SECONDS, SCALES, Bound, Floor, Happening, Scale, binned, of_equal_work
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
    start_of,
)
from highwater.growth.shapes import Step, find_step, has_levelled_off, has_load_fallen, has_trend, is_within
from highwater.readings.growth import GrowthGround, GrowthKind, GrowthUnit
from highwater.units import span_text

# The floors of a start: weights are loaded, and caches, heaps and kernels find their sizes.
WARM_UP_FLOORS: Final = 3
BETWEEN_REQUESTS: Final = f"after each burst of requests, and every {REPEAT_SECONDS:.0f} s while no request comes"
MIN_JUDGED: Final = 6
# So long a load is watched before a series is said not to grow under it.
MIN_LEVEL_SECONDS: Final = 1200.0
# A rise that was found so many floors ago as well is confirmed.
CONFIRMING_FLOORS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict and its evidence.

    Attributes:
        why: Why it is not known; empty for other verdicts.
        grown: From the first floors that count to the last.
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
    since = floors[-1].wall if floors else None
    if before is not None and before.kind == verdict.kind:
        since = before.since
    return replace(
        verdict,
        ground=ground,
        value=floors[-1].value if floors else None,
        grown=end_of(values) - start_of(values) if values else None,
        floors=len(counted),
        window_seconds=counted[-1].at - counted[0].at if counted else 0.0,
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
    bound = None if rise is None else _bound_of(rise, floors[-1].value, bounds, scale)
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


def _bound_of(rise: Rise, value: float, bounds: Sequence[Bound], scale: Scale) -> Bound | None:
    """Return the bound that the rise is on its way to."""
    drivers = {rise.driver, *rise.also}
    if "request" in drivers or "image" not in rise.lines:  # a request without an image has tokens too
        drivers -= {"1k_tokens"}
    return _lowest(
        bound for bound in bounds if is_within(bound, value, scale) and (not bound.drivers or bound.drivers & drivers)
    )


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
