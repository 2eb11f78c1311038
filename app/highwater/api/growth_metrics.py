"""Prometheus families of the verdicts on growth: bounded in number, the leaks first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, get_args

from prometheus_client.core import GaugeMetricFamily, Metric

from highwater.readings import GrowthKind, GrowthUnit, SeriesGrowth

# Each series takes five lines. Eight ranks with all their processes have more series; growing series come first.
MAX_SHOWN: Final = 120
_LABELS: Final = ("process", "series")
_UNITS: Final[tuple[tuple[GrowthUnit, str, str], ...]] = (
    ("bytes", "growth_leak_bytes", "Bytes that a series leaks for each unit of its driver: a request, an hour."),
    ("count", "growth_leak_items", "Descriptors or threads that a series leaks for each unit of its driver."),
)


def growth_families(series: Sequence[SeriesGrowth]) -> Iterator[Metric]:
    """Yield the families of the engine that runs, from verdicts with the leaks first."""
    shown = list(islice((one for one in series if not one.is_over), MAX_SHOWN))
    text = "1 for the verdict on how a series of memory moves between requests."
    verdicts = GaugeMetricFamily("highwater_growth_verdict", text, labels=(*_LABELS, "verdict"))
    for one in shown:
        for kind in get_args(GrowthKind):
            verdicts.add_metric((*_labels(one), kind), float(kind == one.verdict))
    yield verdicts
    for unit, name, text in _UNITS:
        rates = GaugeMetricFamily(f"highwater_{name}", text, labels=(*_LABELS, "driver"))
        for one in shown:
            if one.rate is not None and one.unit == unit:
                rates.add_metric((*_labels(one), one.rate.driver), one.rate.per_driver)
        yield rates
    text = "When a leak has used up what is left at its pace; absent where no limit is known."
    ends = GaugeMetricFamily("highwater_growth_exhausted_timestamp_seconds", text, labels=_LABELS)
    for one in shown:
        if one.exhausted_at is not None:
            ends.add_metric(_labels(one), one.exhausted_at)
    yield ends


def _labels(one: SeriesGrowth) -> tuple[str, str]:
    return one.owner, one.measure.removesuffix("_bytes")
