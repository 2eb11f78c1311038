"""Counters of the traffic through the proxy: plain numbers, which a request changes in a fraction of a microsecond.

``prometheus_client``'s own counters take a lock and look up labels each time, a fifth of a request's whole cost here.
Everything is counted on the event loop's thread; a scrape only reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Connections:
    """The proxy's connections at one moment, and the requests sent over them since it started."""

    clients: int = 0
    engine_active: int = 0
    engine_idle: int = 0
    tunnels: int = 0
    requests_on_new: int = 0  # requests sent to the engine over a connection that was opened for them
    requests_on_reused: int = 0  # requests sent to the engine over a connection that had served another one
    retries: int = 0


class Histogram:
    """Values counted by bucket; ``bounds`` are upper ones in rising order, ``total`` is the sum of the values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: of the values above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class PathClass:
    """The counters of one path class; ``ended`` is by method, status code and result."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, int, Result]] = Counter()
        self.durations = Histogram(DURATION_BUCKETS)
        self.first_bytes = Histogram(FIRST_BYTE_BUCKETS)
        self.request_bytes = 0
        self.response_bytes = 0


class ProxyTraffic:
    """The counters of proxied requests; every key comes from a small fixed set.

    ``classes`` are those that ended, by path class; ``upstream_errors`` those that the engine failed, and ``refused``
    those that were not passed on, or not to their end, by reason.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.classes: dict[str, PathClass] = {}
        self.upstream_errors: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def request_started(self) -> None:
        self.under_way += 1

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
        self.under_way -= 1
        counted = self.classes.get(path_class)
        if counted is None:
            counted = self.classes[path_class] = PathClass()
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
        self.upstream_errors[reason] += 1

    def request_refused(self, reason: str) -> None:
        self.refused[reason] += 1

    @property
    def counted(self) -> tuple[int, ...]:
        """Sums that change whenever anything is counted: a few additions instead of all families."""
        ended = sum(each.ended.total() for each in self.classes.values())
        return self.under_way, ended, self.upstream_errors.total(), self.refused.total()

    @property
    def requests_ended(self) -> int:
        return sum(each.ended.total() for name, each in self.classes.items() if name != HEALTH)
