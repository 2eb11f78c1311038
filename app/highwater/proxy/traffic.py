"""Counters of the traffic through the proxy: plain numbers, which a request changes in a fraction of a microsecond.

``prometheus_client``'s own counters take a lock and look up labels each time, a fifth of a request's whole cost here.
Everything is counted on the event loop's thread; a scrape only reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

# A response that is not streamed has its first byte at its end: hence the minutes.
FIRST_BYTE_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
DURATION_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
Result = Literal["complete", "client_left", "truncated", "refused"]
"""The end of a request: the client got the whole response; it left before that; the response began and broke off; the
sidecar responded with an error in the engine's place, or would not read the request to its end."""

# Requests of this path class are counted, and are in no histogram: probes would drown what clients wait for.
HEALTH = "health"
# The refusals that have a family of their own: the gate's, and those while the sidecar stops.
SHED_REASONS = ("gate_full", "held_too_long", "shutting_down")


@dataclass(frozen=True, slots=True)
class Connections:
    """The proxy's connections at one moment, and the requests sent over them since it started."""

    clients: int = 0
    engine_active: int = 0
    engine_idle: int = 0
    tunnels: int = 0
    requests_on_new: int = 0
    """Requests sent to the engine over a connection that was opened for them."""
    requests_on_reused: int = 0
    """Requests sent to the engine over a connection that had served another one."""
    retries: int = 0


class _Histogram:
    """Values counted by bucket; the bounds are upper ones, in rising order."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, label: str) -> None:
        """Add it as one series of the family, unless nothing was counted."""
        if any(self._counts):
            bounds = (*map(floatToGoString, self._bounds), "+Inf")
            buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
            family.add_metric((label,), buckets, self._sum)


class _PathClass:
    """The counters of one path class."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, int, Result]] = Counter()  # by method, status code and result
        self.durations = _Histogram(DURATION_BUCKETS)
        self.first_bytes = _Histogram(FIRST_BYTE_BUCKETS)
        self.request_bytes = 0
        self.response_bytes = 0


class ProxyTraffic:
    """The counters of proxied requests, and their metric families. Every label comes from a small fixed set."""

    def __init__(self) -> None:
        self._under_way = 0
        self._classes: dict[str, _PathClass] = {}
        self._upstream_errors: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    # --- called by the proxy ---

    def request_started(self) -> None:
        """Count a request that is under way."""
        self._under_way += 1

    def request_ended(
        self,
        path_class: str,
        method: str,
        code: int,
        result: Result,
        *,
        seconds: float,
        first_byte_seconds: float | None,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """Count a request that is over; the code is what the client saw, 499 if it left before a response began."""
        self._under_way -= 1
        counted = self._classes.get(path_class)
        if counted is None:
            counted = self._classes[path_class] = _PathClass()
        counted.ended[method, code, result] += 1
        counted.request_bytes += request_bytes
        counted.response_bytes += response_bytes
        if path_class == HEALTH:
            return
        if result != "refused":
            counted.durations.observe(seconds)
        if first_byte_seconds is not None:
            counted.first_bytes.observe(first_byte_seconds)

    def upstream_error(self, reason: str) -> None:
        """Count a request that the engine failed."""
        self._upstream_errors[reason] += 1

    def request_refused(self, reason: str) -> None:
        """Count a request that was not passed on, or not to its end."""
        self._refused[reason] += 1

    # --- called by the exporter ---

    @property
    def counted(self) -> tuple[int, ...]:
        """Sums that change whenever anything is counted: a few additions instead of all families."""
        ended = sum(each.ended.total() for each in self._classes.values())
        return self._under_way, ended, self._upstream_errors.total(), self._refused.total()

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers as they stand."""
        ended = CounterMetricFamily(
            "highwater_proxy_requests",
            "Proxied requests that ended. The result is complete, client_left, truncated (the response broke off) or "
            "refused (the sidecar responded with an error in the engine's place).",
            labels=("path_class", "method", "code", "result"),
        )
        durations = HistogramMetricFamily(
            "highwater_proxy_request_duration_seconds",
            "Time from a proxied request's head to the end of its response, or to where it broke off. Refused requests "
            "and health checks are left out.",
            labels=("path_class",),
        )
        first_bytes = HistogramMetricFamily(
            "highwater_proxy_time_to_first_byte_seconds",
            "Time from a proxied request's head to the first byte of its response's body, of a WebSocket to its "
            "opening. Health checks are left out.",
            labels=("path_class",),
        )
        classes = sorted(self._classes.items())
        for path_class, counted in classes:
            for (method, code, result), count in sorted(counted.ended.items()):
                ended.add_metric((path_class, method, str(code), result), count)
            counted.durations.add_to(durations, path_class)
            counted.first_bytes.add_to(first_bytes, path_class)
        yield ended
        text = "Proxied requests under way."
        yield GaugeMetricFamily("highwater_proxy_requests_in_flight", text, value=self._under_way)
        yield from (durations, first_bytes)
        text = "Bytes of heads and bodies that clients sent in proxied requests, counted when a request ends."
        received = [(name, counted.request_bytes) for name, counted in classes]
        yield _counter("highwater_proxy_request_bytes", text, "path_class", received)
        text = "Bytes of heads and bodies that clients were sent in response, counted when a request ends."
        sent = [(name, counted.response_bytes) for name, counted in classes]
        yield _counter("highwater_proxy_response_bytes", text, "path_class", sent)
        yield from self._failure_families()

    def _failure_families(self) -> Iterator[Metric]:
        left = sum(
            count
            for counted in self._classes.values()
            for (_, _, result), count in counted.ended.items()
            if result == "client_left"
        )
        text = "Clients that left before their response was complete."
        yield CounterMetricFamily("highwater_proxy_client_disconnects", text, value=left)
        text = "Proxied requests that the engine failed."
        yield _counter("highwater_proxy_upstream_errors", text, "reason", sorted(self._upstream_errors.items()))
        text = "Requests on the data plane that the sidecar refused, or would not read to their end."
        yield _counter("highwater_proxy_refused", text, "reason", sorted(self._refused.items()))
        text = "Refused requests that got 503 while new ones were held for a reset, or while the sidecar stopped."
        # From 0 on: many at once, at the first reset that sheds any, are an increase and not a series that begins.
        shed = [(reason, self._refused.get(reason, 0)) for reason in SHED_REASONS]
        yield _counter("highwater_proxy_requests_shed", text, "reason", shed)


def connection_families(connections: Connections) -> Iterator[Metric]:
    """Yield the families of the proxy's connections."""
    text = "Open connections of clients; with a control_port, those of the data port."
    yield GaugeMetricFamily("highwater_proxy_connections", text, value=connections.clients)
    text = "Open connections to the engine: active while they serve a request, idle while they are kept for the next."
    engine = GaugeMetricFamily("highwater_proxy_engine_connections", text, labels=("state",))
    engine.add_metric(("active",), connections.engine_active)
    engine.add_metric(("idle",), connections.engine_idle)
    yield engine
    text = "Requests sent to the engine, by whether their connection was new or reused."
    requests = [("new", connections.requests_on_new), ("reused", connections.requests_on_reused)]
    yield _counter("highwater_proxy_engine_requests", text, "connection", requests)
    text = "Requests sent to the engine once more, because a kept connection was closed before a response."
    yield CounterMetricFamily("highwater_proxy_retries", text, value=connections.retries)
    text = "Open WebSocket tunnels."
    yield GaugeMetricFamily("highwater_proxy_tunnels", text, value=connections.tunnels)


def _counter(name: str, text: str, label: str, counts: Sequence[tuple[str, int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in counts:
        family.add_metric((value,), count)
    return family
