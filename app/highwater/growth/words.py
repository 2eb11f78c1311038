"""A verdict as it is reported: in figures, and in one sentence. Pure; no I/O, no clock."""

from __future__ import annotations

from typing import Final

from highwater.growth.judging import Judgement
from highwater.growth.leak import Leak
from highwater.growth.series import SeriesKey
from highwater.readings import GrowthRate, GrowthUnit, SeriesGrowth
from highwater.text.growth import DRIVER_TITLES, amount_text, rate_text
from highwater.units import span_text

_HOUR_SECONDS: Final = 3600.0
# Further away is no date.
_HORIZON_SECONDS: Final = 366 * 86_400.0


def series_growth(
    key: SeriesKey,
    judgement: Judgement,
    *,
    room: float | None = None,
    limit_by: str | None = None,
    now: float,
    is_over: bool = False,
) -> SeriesGrowth:
    """Return the verdict as it is reported.

    Args:
        key: The series.
        judgement: The verdict.
        room: What is left to its limit; ``None`` where none is known.
        limit_by: That limit, in words.
        now: Unix seconds.
        is_over: Whether its process has ended.
    """
    leak, bound, step = judgement.leak, judgement.bound, judgement.step
    exhausted_at = None if leak is None or is_over else _exhausted_at(leak, room, now)
    return SeriesGrowth(
        series=key.name,
        owner=key.owner,
        measure=key.measure,
        place=key.place,
        unit=key.unit,
        verdict=judgement.kind,
        text=_text(key, judgement, is_over=is_over),
        value=judgement.value,
        grown=judgement.grown,
        rate=None if leak is None else _rate(leak),
        bound=None if bound is None else bound.limit,
        bound_by=None if bound is None else bound.what,
        step=None if step is None else step.size,
        step_at=None if step is None else step.until.wall,
        step_by=None if step is None else step.what,
        exhausted_at=exhausted_at,
        limit_by=limit_by if exhausted_at is not None else None,
        floors=judgement.floors if leak is None else leak.floors,
        window_seconds=judgement.window_seconds if leak is None else leak.window_seconds,
        since=judgement.since,
        is_over=is_over,
    )


def _rate(leak: Leak) -> GrowthRate:
    line = leak.line
    return GrowthRate(
        driver=leak.driver,
        per_driver=line.slope,
        low=line.low,
        high=line.high,
        per_hour=None if leak.hourly is None else leak.hourly.slope,
        also=leak.also,
    )


def _exhausted_at(leak: Leak, room: float | None, now: float) -> float | None:
    if room is None or leak.hourly is None:
        return None
    seconds = max(room, 0.0) / leak.hourly.slope * _HOUR_SECONDS
    return now + seconds if seconds <= _HORIZON_SECONDS else None


def _text(key: SeriesKey, judgement: Judgement, *, is_over: bool) -> str:
    """Return one sentence, without the series' name; in the past tense where its process has ended."""
    grown = amount_text(judgement.grown, key.unit, signed=True)
    window = span_text(judgement.window_seconds)
    if judgement.kind == "leak" and judgement.leak is not None:
        return _leak_text(judgement.leak, key.unit, is_over=is_over)
    if judgement.kind == "step" and judgement.step is not None:
        size = amount_text(judgement.step.size, key.unit)
        return f"it made one step of {size}, {_cause(judgement.step.what)}, and stands otherwise"
    if judgement.kind == "plateau":
        return _plateau_text(key.unit, judgement, grown)
    if judgement.kind == "flat":
        return f"it {'moved' if is_over else 'moves'} by {grown} in {window}, without a trend"
    return judgement.why


def _leak_text(leak: Leak, unit: GrowthUnit, *, is_over: bool) -> str:
    rate = rate_text(_rate(leak), unit)
    also = ", ".join(f"per {DRIVER_TITLES[name]}" for name in leak.also)
    instead = f"; it cannot be told from growth {also}" if also else ""
    verb = "leaked" if is_over else "leaks"
    return f"it {verb} {rate}, by {leak.floors} idle floors over {span_text(leak.window_seconds)}{instead}"


def _cause(what: str | None) -> str:
    return "with no known event near it" if what is None else f"at: {what}"


def _plateau_text(unit: GrowthUnit, judgement: Judgement, grown: str) -> str:
    bound = judgement.bound
    if bound is None:
        return f"it grew by {grown} and has levelled off at {amount_text(judgement.value, unit)}"
    return f"it grows by design, up to {amount_text(bound.limit, unit)} ({bound.what}): {grown} so far"
