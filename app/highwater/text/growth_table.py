"""The table of all verdicts on growth."""

from __future__ import annotations

from collections.abc import Sequence

from highwater.readings import SeriesGrowth
from highwater.text.growth import VERDICT_TITLES, amount_text, exhaustion_text, rate_text, series_title
from highwater.text.table import table
from highwater.units import UNKNOWN, span_text


def growth_table(series: Sequence[SeriesGrowth]) -> str:
    """Return every verdict with its figures, a series a row, and below it the sentences of those that are not flat."""
    if not series:
        return "no verdict yet: a series is judged from its idle floors, and the engine has not rested so far\n"
    rows = [
        [
            series_title(one),
            VERDICT_TITLES[one.verdict],
            amount_text(one.value, one.unit),
            amount_text(one.grown, one.unit, signed=True),
            UNKNOWN if one.rate is None else rate_text(one.rate, one.unit),
            str(one.floors),
            span_text(one.window_seconds),
        ]
        for one in series
    ]
    shown = table(["series", "verdict", "value", "grown", "rate (95 % interval)", "floors", "window"], rows)
    told = [f"{series_title(one)}: {one.text}{exhaustion_text(one)}" for one in series if one.verdict != "flat"]
    return "\n".join([shown, *told]) + "\n"
