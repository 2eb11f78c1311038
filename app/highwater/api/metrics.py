"""The page of ``/metrics``, from the last report and from what is counted as it happens.

A page needs no I/O: it shows the last report, and per-rank families vanish while that is stale, so that a dead engine's
numbers do not look current. Endpoint pickers scrape twenty times a second, so each part of the page is rendered once
and then only when what it shows has changed. The golden file ``tests/unit/api/golden/metrics.txt`` shows every family.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Generic, TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from highwater.api.counters import Counters
from highwater.api.families import (
    connection_families,
    counted,
    growth_families,
    host_families,
    known,
    policy_families,
    report_families,
    traffic_families,
)
from highwater.diagnose.evidence import IncidentKind
from highwater.host.cgroup import memory_limit
from highwater.host.watch import HostNow
from highwater.proxy.traffic import Connections
from highwater.readings.growth import SeriesGrowth
from highwater.readings.policy import PolicyStatus
from highwater.readings.report import Report

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""Of the classic text format, whatever a scraper accepts: vLLM speaks no other, and a page has one format."""
_T = TypeVar("_T")


class _Part(Collector, Generic[_T]):
    """Families of the page for what ``read`` returns, rendered again when it changes; ``None``: no families."""

    def __init__(self, read: Callable[[], _T], families: Callable[[_T], Iterable[Metric]]) -> None:
        self._read = read
        self._families = families
        self._value: _T | None = None
        self._text = b""

    def text(self) -> bytes:
        value = self._read()
        if value != self._value:
            self._value = value
            self._text = generate_latest(self)
        return self._text

    def collect(self) -> Iterable[Metric]:
        return () if self._value is None else self._families(self._value)


class Exporter:
    """The page of metrics; the callables return each part's value as it stands.

    Args:
        oom_kills: Of processes of the engine, over all its lives.
        process: Reads the sidecar's own process; once a second at most, since a descriptor is a file to list.
        process_memory_limit: Bytes; ``None`` without a limit. As often.
    """

    def __init__(
        self,
        counters: Counters,
        report: Callable[[], Report],
        policy: Callable[[], PolicyStatus],
        *,
        held: Callable[[], int] = lambda: 0,
        connections: Callable[[], Connections] = Connections,
        dropped_lines: Callable[[], int] = lambda: 0,
        incidents: Callable[[], Mapping[IncidentKind, int]] = dict,
        growth: Callable[[], tuple[SeriesGrowth, ...]] = tuple,
        host: Callable[[], HostNow | None] = lambda: None,
        oom_kills: Callable[[], int | None] = lambda: None,
        process: Collector | None = None,
        process_memory_limit: Callable[[], int | None] = memory_limit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # With a prefix: vLLM's own page, which follows on the same one, has the plain names.
        own_process = process or ProcessCollector(namespace="highwater", registry=None)

        self.counters = counters

        def ageless() -> Report:
            # The age goes on while the report stays what it is.
            return replace(report(), age_seconds=None)

        def process_families(_: int) -> Iterator[Metric]:
            yield from own_process.collect()
            yield from known("process_memory_limit_bytes", process_memory_limit())

        self._parts = (
            _Part(ageless, report_families),
            _value("report_age_seconds", lambda: report().age_seconds),
            # To judge the rules takes longer than to render them, and they are judged by the report.
            _Part(lambda: (ageless(), counters.changes), lambda _: policy_families(policy())),
            _Part(lambda: counters.changes, lambda _: counters.registry.collect()),
            _Part(lambda: counters.traffic.counted, lambda _: traffic_families(counters.traffic)),
            _Part(host, host_families),
            _value("engine_oom_kills_total", oom_kills),
            _value("proxy_requests_held", held),
            _Part(connections, connection_families),
            _value("access_log_lines_dropped_total", dropped_lines),
            _Part(lambda: dict(incidents()), lambda kinds: [counted("incidents_total", "kind", kinds)]),
            _Part(
                lambda: dict(counters.internal_errors.counts),
                lambda parts: [counted("internal_errors_total", "part", parts)],
            ),
            _Part(growth, growth_families),
            _Part(lambda: int(clock()), process_families),
        )

    def page(self) -> bytes:
        return b"".join(part.text() for part in self._parts)


def _value(name: str, read: Callable[[], float | None]) -> _Part[float | None]:
    return _Part(read, lambda value: known(name, value))
