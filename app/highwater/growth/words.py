"""A verdict as it is reported: in figures, and in one sentence. Pure; no I/O, no clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from highwater.growth.floors import WINDOW_SECONDS
from highwater.growth.judging import Judgement
from highwater.growth.series import Measured, SeriesKey
from highwater.model.components import component_title
from highwater.model.growth import GrowthDriver, GrowthKind, GrowthRate, GrowthUnit, SeriesGrowth, seconds_until
from highwater.model.units import HOUR_SECONDS, MIB, UNKNOWN, size_text, span_text, table

DRIVER_TITLES: Final[Mapping[GrowthDriver, str]] = {
    "request": "request",
    "image": "image",
    "new_image": "new image",
    "1k_tokens": "1,000 tokens",
    "sleep": "sleep",
    "hour": "hour",
}
VERDICT_TITLES: Final[Mapping[GrowthKind, str]] = {
    "leak": "leak",
    "step": "step",
    "plateau": "plateau",
    "not_known": "not known",
    "flat": "flat",
}
_WHOLE: Final = 100
# So many series are named before the sentence that they share.
_NAMED: Final = 3


def series_title(one: SeriesGrowth) -> str:
    return f"{one.owner}: {component_title(one.measure)}"


def amount_text(value: float | None, unit: GrowthUnit, *, signed: bool = False) -> str:
    if unit == "bytes" or value is None:
        return size_text(value, signed=signed)
    digits = 0 if abs(value) >= _WHOLE or float(value).is_integer() else 1
    return f"{value:{'+' if signed else ''},.{digits}f}"


def rate_text(rate: GrowthRate, unit: GrowthUnit) -> str:
    low, high = amount_text(rate.low, unit), amount_text(rate.high, unit)
    return f"{amount_text(rate.per_driver, unit)} per {DRIVER_TITLES[rate.driver]} ({low} to {high})"


def leaks(series: Sequence[SeriesGrowth]) -> list[SeriesGrowth]:
    return [one for one in series if one.verdict == "leak"]


def growth_line(series: Sequence[SeriesGrowth]) -> str:
    named = [leak_line(one) for one in leaks(series)]
    # Of what is not known there is nothing to say in a line: the table says why.
    counts: Counter[GrowthKind] = Counter(
        one.verdict for one in series if one.verdict not in ("leak", "not_known") and not one.is_over
    )
    rest = ", ".join(f"{counts[kind]} {title}" for kind, title in VERDICT_TITLES.items() if counts[kind])
    return "; ".join([*named, rest] if rest else named)


def leak_line(one: SeriesGrowth) -> str:
    rate = "" if one.rate is None else f" {rate_text(one.rate, one.unit)}"
    return f"{series_title(one)} {'leaked' if one.is_over else 'leaks'}{rate}{exhaustion_text(one)}"


def exhaustion_text(one: SeriesGrowth) -> str:
    if one.exhausted_at is None:
        return ""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(one.exhausted_at))
    return f", and at this pace {one.limit_by} is used up on {date}"


def growth_table(series: Sequence[SeriesGrowth], causes: Sequence[str] = ()) -> str:
    above = "".join(f"{cause}\n\n" for cause in causes)
    if not series:
        when = "values while no request runs, or the lowest values of windows with equal work: each needs minutes"
        return f"{above}no verdict yet: a series is judged by its {when}\n"
    rows = [
        [
            series_title(one),
            f"{VERDICT_TITLES[one.verdict]}{', over' if one.is_over else ''}",
            amount_text(one.value, one.unit),
            amount_text(one.grown, one.unit, signed=True),
            UNKNOWN if one.rate is None else rate_text(one.rate, one.unit),
            f"{one.floors}{'' if one.ground == 'idle_floors' else ' of load'}",
            span_text(one.window_seconds),
        ]
        for one in series
    ]
    shown = table(["series", "verdict", "at the last floor", "grown", "rate (95 % interval)", "floors", "window"], rows)
    titles: dict[str, list[str]] = {}
    for one in series:
        if one.verdict != "flat":
            advice = f". First: {one.advice}" if one.advice is not None else ""
            said = f"{one.text}{exhaustion_text(one)}{advice}"
            titles.setdefault(said, []).append(series_title(one))
    # Of many that share a sentence the number is enough: the table above has their names.
    lines = (
        f"{', '.join(names) if len(names) <= _NAMED else f'{len(names)} series'}: {verdict}"
        for verdict, names in titles.items()
    )
    return above + "\n".join([shown, *lines]) + "\n"


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
    key: SeriesKey, judgement: Judgement, *, measured: Measured | None, now: float, is_over: bool = False
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
    window = judgement if leak is None else leak
    return SeriesGrowth(
        series=key.name,
        owner=key.owner,
        measure=key.measure,
        place=key.place,
        unit=key.unit,
        verdict=judgement.kind,
        text=_text(key, judgement, rate, is_over=is_over),
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
        floors=window.floors,
        window_seconds=window.window_seconds,
        since=judgement.since,
        is_over=is_over,
    )


def _text(key: SeriesKey, judgement: Judgement, rate: GrowthRate | None, *, is_over: bool) -> str:
    """Return one sentence, without the series' name; where its process has ended, in the past tense and with that."""
    if is_over and judgement.kind == "not_known":  # what would settle it comes too late
        return f"{_TOO_SOON}; {_OVER}"
    by_work = _BY_WORK if judgement.ground == "equal_work" else ""
    return f"{_clause(key, judgement, rate, is_over=is_over)}{by_work}{f'; {_OVER}' if is_over else ''}"


def _clause(key: SeriesKey, judgement: Judgement, rate: GrowthRate | None, *, is_over: bool) -> str:
    kind, leak, step, bound = judgement.kind, judgement.leak, judgement.step, judgement.bound
    value, grown = amount_text(judgement.value, key.unit), amount_text(judgement.grown, key.unit, signed=True)
    if leak is not None and rate is not None:
        also = ", ".join(f"per {DRIVER_TITLES[name]}" for name in leak.also)
        return (
            f"it {'leaked' if is_over else 'leaks'} {rate_text(rate, key.unit)}, by {leak.floors} floors over "
            f"{span_text(leak.window_seconds)}{f'; it cannot be told from growth {also}' if also else ''}"
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
