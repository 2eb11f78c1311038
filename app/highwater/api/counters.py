"""Counters of what happens: polls, remedies, the policy's actions, denied control calls. ``metrics`` shows them."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from highwater import __version__
from highwater.accounting.components import COMPONENTS
from highwater.api.families import HELP
from highwater.process.internal_errors import InternalErrors
from highwater.proxy.traffic import ProxyTraffic
from highwater.readings.event import Trigger
from highwater.readings.remedy import RemedyResult

_POLL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RESET_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


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
