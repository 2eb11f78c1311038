"""A verdict in words: its rate, a line, a table. Pure; no I/O, no clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from highwater.model.components import component_title
from highwater.model.growth import GrowthDriver, GrowthKind, GrowthRate, GrowthUnit, SeriesGrowth
from highwater.model.units import UNKNOWN, size_text, span_text, table

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
