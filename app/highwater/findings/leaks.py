"""The rule about leaks: what was found between requests, before anything happened. Pure."""

from __future__ import annotations

from typing import Final

from highwater.findings import advice as known
from highwater.findings.case import Case
from highwater.findings.finding import Advice, Finding
from highwater.readings import SeriesGrowth
from highwater.text.growth import leak_line, series_title
from highwater.text.growth import leaks as leaking

RESTART_FREES: Final = Advice(
    setting="Restart the engine",
    change="It gives back what leaked, and the leak begins again. Before the date above the time can be chosen.",
    cost="The requests under way, and the time of a start.",
)


def leaks(case: Case) -> Finding | None:
    """Report the series that leak."""
    found = leaking(case.series)
    if not found:
        return None
    first = found[0]
    others = f"; so does {', '.join(map(series_title, found[1:]))}" if found[1:] else ""
    return Finding(
        name="leaks",
        weight="clue" if case.kind in {"hung", "start_failed"} else "likely",
        title=f"memory leaks between requests: {leak_line(first)}{others}",
        text=(
            "By what the series held between requests, once releasable bytes were taken off: "
            f"{'. '.join(f'{series_title(one)}: {one.text}' for one in found)}. No remedy gives back what leaks; a "
            "restart does, and a report to vLLM needs these figures."
        ),
        figures={
            "series": first.series,
            "driver": None if first.rate is None else first.rate.driver,
            "per_driver": None if first.rate is None else first.rate.per_driver,
            "low": None if first.rate is None else first.rate.low,
            "high": None if first.rate is None else first.rate.high,
            "idle_floors": first.floors,
            "window_seconds": first.window_seconds,
        },
        advice=_advice(first),
    )


def _advice(one: SeriesGrowth) -> tuple[Advice, ...]:
    if one.place == "device":
        return (RESTART_FREES, known.POLICY_EARLIER)
    return (RESTART_FREES, known.MEMORY_LIMIT) if one.unit == "bytes" else (RESTART_FREES,)
