"""What passes through the proxy, counted: plain numbers that one request may change for a fraction of a microsecond.

``prometheus_client``'s own counters take a lock and look up labels each time, which is a fifth of all that a request
costs here. Everything is counted on the event loop's thread; a scrape only reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Traffic(Collector):
    """The families of the proxied requests, and what changes them."""

    def __init__(self) -> None:
        self._under_way = 0
        self._ended: Counter[tuple[str, str, int]] = Counter()
        self._first_bytes = [0] * (len(FIRST_BYTE_BUCKETS) + 1)
        self._first_byte_seconds = 0.0

    def started(self) -> None:
        """A request is under way."""
        self._under_way += 1

    def ended(self, path_class: str, method: str, code: int, first_byte_seconds: float | None) -> None:
        """It is over."""
        self._under_way -= 1
        self._ended[path_class, method, code] += 1
        if first_byte_seconds is not None:
            self._first_bytes[bisect_left(FIRST_BYTE_BUCKETS, first_byte_seconds)] += 1
            self._first_byte_seconds += first_byte_seconds

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are all that a registry would look at."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The numbers as they stand."""
        ended = CounterMetricFamily(
            "highwater_proxy_requests", "Proxied requests that ended.", labels=("path_class", "method", "code")
        )
        for (path_class, method, code), count in sorted(self._ended.items()):
            ended.add_metric((path_class, method, str(code)), count)
        yield ended
        text = "Proxied requests under way."
        yield GaugeMetricFamily("highwater_proxy_requests_in_flight", text, value=self._under_way)
        bounds = (*map(floatToGoString, FIRST_BYTE_BUCKETS), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(self._first_bytes)), strict=True))
        text = "Time from a proxied request's head to the first byte of its answer's body."
        first_byte = HistogramMetricFamily("highwater_proxy_time_to_first_byte_seconds", text)
        first_byte.add_metric((), buckets, self._first_byte_seconds)
        yield first_byte
