"""The page of ``/metrics``: ours, from the last report and what is counted as it happens, and vLLM's own behind it.

Ours needs no I/O: it shows the last report, and per-rank families vanish while that is stale, so that a dead engine's
numbers do not look current. Endpoint pickers scrape twenty times a second, so each part of the page is rendered once
and then only when what it shows has changed. The golden file ``tests/unit/http/golden/metrics.txt`` shows every family.

vLLM's is fetched for each scrape, so that scrapers of vLLM keep working. It is not cached: without a response in time
it is left out, because old figures look like a running engine. And it is checked: one invalid line, or a family that
is on the page twice, costs a scraper the whole page.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from gated_proxy.door import Door
from gated_proxy.traffic import Connections, ProxyTraffic
from highwater import __version__
from highwater.diagnose.evidence import IncidentKind
from highwater.diagnose.verdict import verdict
from highwater.engine.client import Engine
from highwater.host.kernel import memory_limit
from highwater.host.watch import HostNow
from highwater.http.families import (
    HELP,
    connection_families,
    counted,
    door_families,
    growth_families,
    host_families,
    known,
    policy_families,
    report_families,
    traffic_families,
    verdict_families,
)
from highwater.model.components import COMPONENTS
from highwater.model.growth import SeriesGrowth
from highwater.model.policy import PolicyStatus
from highwater.model.remedies import RemedyResult
from highwater.model.report import Report, Trigger
from highwater.process.errors import EngineError, EngineGarbled, InternalErrors

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""Of the classic text format, whatever a scraper accepts: vLLM speaks no other, and a page has one format."""
_POLL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RESET_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Counters:
    """Observes the sidecar's parts, and counts; ``changes`` increases with each change of a value, or of the policy."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.changes = 1
        self.internal_errors = InternalErrors()
        self.traffic = ProxyTraffic()
        self._poll_seconds = self._histogram("poll_duration_seconds")
        self._poll_failures = self._counter("poll_failures_total", "source", "reason")
        self._resets = self._counter("resets_total", "remedy", "trigger", "outcome")
        self._freed = self._counter("reset_freed_bytes_total", "remedy", "component")
        self._reset_seconds = self._histogram("reset_duration_seconds", "remedy")
        self._hold_seconds = self._histogram("reset_hold_seconds", "remedy")
        self._actions = self._counter("policy_actions_total", "rule", "remedy", "outcome")
        self._denied = self._counter("control_denied_total", "reason")
        for reason in ("no_token", "wrong_token", "closed"):
            self._denied.labels(reason)
        build = Gauge("highwater_build_info", HELP["build_info"], ("version",), registry=self.registry)
        build.labels(__version__).set(1)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(f"highwater_{name}", HELP[name], labels, registry=self.registry)

    def _histogram(self, name: str, *labels: str) -> Histogram:
        buckets = _RESET_BUCKETS if labels else _POLL_BUCKETS
        return Histogram(f"highwater_{name}", HELP[name], labels, buckets=buckets, registry=self.registry)

    def polled(self, seconds: float) -> None:
        self.changes += 1
        self._poll_seconds.observe(seconds)

    def poll_failed(self, source: str, reason: str) -> None:
        self.changes += 1
        self._poll_failures.labels(source, reason).inc()

    def remedy_ended(self, result: RemedyResult, trigger: Trigger) -> None:
        self.changes += 1
        self._resets.labels(result.remedy, trigger, result.outcome).inc()
        if result.outcome not in {"done", "failed"}:
            return
        self._reset_seconds.labels(result.remedy).observe(result.seconds)
        if result.held_seconds is not None:
            self._hold_seconds.labels(result.remedy).observe(result.held_seconds)
        for component in COMPONENTS:
            size = getattr(result.credited_components, component.name)
            if size is not None:
                self._freed.labels(result.remedy, component.label).inc(size)

    def policy_acted(self, rule: str, remedy: str, outcome: str) -> None:
        self.changes += 1
        self._actions.labels(rule, remedy, outcome).inc()

    def policy_changed(self) -> None:
        self.changes += 1

    def control_denied(self, reason: str) -> None:
        self.changes += 1
        self._denied.labels(reason).inc()


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
        whole: The report with all that the verdict is made of; without it, report and policy alone.
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
        whole: Callable[[], Report] | None = None,
        held: Callable[[], int] = lambda: 0,
        door: Door | None = None,
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

        def judged() -> Report:
            return replace(report(), policy=policy()) if whole is None else whole()

        def process_families(_: int) -> Iterator[Metric]:
            yield from own_process.collect()
            yield from known("process_memory_limit_bytes", process_memory_limit())

        self._parts = (
            _Part(ageless, report_families),
            _value("report_age_seconds", lambda: report().age_seconds),
            # To judge the rules takes longer than to render them, and they are judged by the report.
            _Part(lambda: (ageless(), counters.changes), lambda _: policy_families(policy())),
            _Part(lambda: (ageless(), counters.changes), lambda _: verdict_families(verdict(judged()))),
            _Part(lambda: counters.changes, lambda _: counters.registry.collect()),
            _Part(lambda: counters.traffic.counted, lambda _: traffic_families(counters.traffic)),
            _Part(host, host_families),
            _value("engine_oom_kills_total", oom_kills),
            _value("proxy_requests_held", held),
            *(() if door is None else (_Part(lambda: door.counted, lambda _: door_families(door)),)),
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


# --- vLLM's own page ---

SECONDS: Final = 0.25
# 64 data-parallel engines behind one API server have a page of 3 MB.
MAX_BYTES: Final = 8 * 1024 * 1024
# Read in one go: checking it takes less than a millisecond, for which every stream of the proxy waits.
_PIECE_BYTES: Final = 64 * 1024

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL = rb'[a-zA-Z_][a-zA-Z0-9_]*+="[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'
_NUMBER = rb"[-+]?(?:\d++(?:\.\d*+)?(?:[eE][-+]?\d++)?|Inf|NaN)"
_SAMPLE = _NAME + rb"(?:\{(?:" + _LABEL + rb",?)*+\})?+ " + _NUMBER + rb"(?: -?\d++)?"
_TYPE = rb"# TYPE " + _NAME + rb" (?:counter|gauge|histogram|summary|untyped)"
_LINES = re.compile(rb"(?:(?:" + _SAMPLE + rb"|" + _TYPE + rb"|#(?! TYPE )[^\n]*+|)\n)*+")
_DECLARATION = re.compile(rb"\n# (HELP|TYPE) (" + _NAME + rb")")
_OURS = re.compile(rb"^highwater_[^\n]*\n", re.MULTILINE)


class EnginePage:
    """The engine's page; scrapes at the same time share one request, and wait for it at most ``seconds``."""

    def __init__(self, engine: Engine, *, seconds: float = SECONDS) -> None:
        self._engine = engine
        self._seconds = seconds
        self._request: asyncio.Task[bytes] | None = None
        self._problem: str | None = None

    async def read(self) -> bytes:
        """Return the engine's families in the classic text format; nothing if it does not return them in time."""
        if self._request is None or self._request.done():
            self._request = asyncio.create_task(self._fetch())
        # A scraper that disconnects must not cancel the request for the others.
        return await asyncio.shield(self._request)

    async def _fetch(self) -> bytes:
        page, problem = b"", None
        try:
            response = await self._engine.get_within("/metrics", seconds=self._seconds, max_bytes=MAX_BYTES)
            if response.status != HTTPStatus.OK or not response.content_type.startswith("text/plain"):
                raise EngineGarbled(f"GET /metrics: status {response.status}, content type {response.content_type!r}")
            families, pieces, begin = _Families(), list[bytes](), 0
            while begin < len(response.body):
                end = response.body.find(b"\n", begin + _PIECE_BYTES) + 1 or len(response.body)
                pieces.append(families.take(response.body[begin:end]))
                begin = end
                await asyncio.sleep(0)
            page = b"".join(pieces)
        except EngineError as exc:
            problem = f"vLLM's own families are left out of /metrics: {exc}"
        if problem != self._problem:  # logged once: there may be twenty scrapes a second
            log.info("%s", problem or "vLLM's own families are in /metrics again")
            self._problem = problem
        return page


class _Families:
    """vLLM's families, piece by piece, without those that are declared twice or have our names."""

    def __init__(self) -> None:
        self._declared: set[tuple[bytes, bytes]] = set()
        self._name = b""
        self._is_kept = True

    def take(self, piece: bytes) -> bytes:
        """Return the part of some whole lines that is passed on. Raises EngineGarbled for no exposition."""
        try:
            piece.decode()
        except UnicodeDecodeError as exc:
            raise EngineGarbled("GET /metrics is no Prometheus exposition") from exc
        if not _LINES.fullmatch(piece):
            raise EngineGarbled("GET /metrics is no Prometheus exposition")
        lines, parts, at = b"\n" + piece, list[bytes](), 1
        for declaration in _DECLARATION.finditer(lines):
            parts.append(self._samples(lines[at : declaration.start() + 1]))
            kind, name = declaration[1], declaration[2]
            if name == self._name:  # its HELP and then its TYPE, unless it begins again
                self._is_kept = self._is_kept and (kind, name) not in self._declared
            else:
                is_again = {(b"HELP", name), (b"TYPE", name)} & self._declared
                self._is_kept = not is_again and not name.startswith(b"highwater_")
            self._declared.add((kind, name))
            self._name = name
            at = declaration.start() + 1
        parts.append(self._samples(lines[at:]))
        return b"".join(parts)

    def _samples(self, lines: bytes) -> bytes:
        if not self._is_kept:
            return b""
        return _OURS.sub(b"", lines) if b"highwater_" in lines else lines
