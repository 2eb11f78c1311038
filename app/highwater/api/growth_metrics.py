"""Prometheus families of the verdicts on growth: bounded in number, the leaks first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, get_args

from prometheus_client.core import Metric

from highwater.api.families import gauge
from highwater.readings.growth import GrowthKind, GrowthUnit, SeriesGrowth

# Each series takes five lines. Eight ranks with all their processes have more series; growing series come first.
MAX_SHOWN: Final = 120
_LABELS: Final = ("process", "series")
_UNITS: Final[tuple[tuple[GrowthUnit, str, str], ...]] = (
    ("bytes", "growth_leak_bytes", "Bytes that a series leaks for each unit of its driver: a request, an hour."),
    ("count", "growth_leak_items", "Descriptors or threads that a series leaks for each unit of its driver."),
)


def growth_families(series: Sequence[SeriesGrowth]) -> Iterator[Metric]:
    shown = list(islice((one for one in series if not one.is_over), MAX_SHOWN))
    yield gauge(
        "growth_verdict",
        "1 for the verdict on how a series of memory moves between requests, or at its lowest under load.",
        (*_LABELS, "verdict"),
        (((*_labels(one), kind), kind == one.verdict) for one in shown for kind in get_args(GrowthKind)),
    )
    for unit, name, text in _UNITS:
        rates = [(_labels(one), one.rate) for one in shown if one.unit == unit and one.rate is not None]
        rows = (((*labels, rate.driver), rate.per_driver) for labels, rate in rates)
        yield gauge(name, text, (*_LABELS, "driver"), rows)
    text = "When a leak has used up what is left at its pace; absent where no limit is known."
    ends = ((_labels(one), one.exhausted_at) for one in shown)
    yield gauge("growth_exhausted_timestamp_seconds", text, _LABELS, ends)


def _labels(one: SeriesGrowth) -> tuple[str, str]:
    return one.owner, one.measure.removesuffix("_bytes")
