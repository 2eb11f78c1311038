"""The forms of a Prometheus family: rows of label values and a number, which is left out where it is not known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Labels: TypeAlias = tuple[str, ...]
Row: TypeAlias = tuple[Labels, float | None]


class Form(Protocol):
    def __call__(self, name: str, text: str, labels: Labels, rows: Iterable[Row]) -> Metric: ...


def gauge(name: str, text: str, labels: Labels, rows: Iterable[Row]) -> Metric:
    return _filled(GaugeMetricFamily(f"highwater_{name}", text, labels=labels), rows)


def counter(name: str, text: str, labels: Labels, rows: Iterable[Row]) -> Metric:
    """Return a counter; the page adds ``_total`` to its name."""
    return _filled(CounterMetricFamily(f"highwater_{name}", text, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[Row]) -> Metric:
    for labels, value in rows:
        if value is not None:
            family.add_metric(labels, value)
    return family


def known(name: str, text: str, value: float | None, form: Form = gauge) -> Iterator[Metric]:
    if value is not None:
        yield form(name, text, (), [((), value)])


def counted(name: str, text: str, label: str, counts: Mapping[Any, int] | Iterable[tuple[str, int]]) -> Metric:
    pairs = counts.items() if isinstance(counts, Mapping) else counts
    return counter(name, text, (label,), (((value,), count) for value, count in pairs))


def one_of(name: str, text: str, label: str, literal: object, now: str) -> Metric:
    return gauge(name, text, (label,), (((value,), value == now) for value in get_args(literal)))
