"""Prometheus families of the traffic through the proxy, and of its connections."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from gated_proxy.traffic import Connections, Histogram, ProxyTraffic
from highwater.api.families import counted, counter, gauge, known

# The refusals that have a family of their own: the gate's, and those while the sidecar stops.
SHED_REASONS: Final = ("gate_full", "held_too_long", "shutting_down")


def traffic_families(traffic: ProxyTraffic) -> Iterator[Metric]:
    classes = sorted(traffic.classes.items())
    ended = [(name, key, count) for name, of_class in classes for key, count in sorted(of_class.ended.items())]
    yield counter(
        "proxy_requests",
        "Proxied requests that ended. The result is complete, client_left, truncated (the response broke off) or "
        "refused (the sidecar responded with an error in the engine's place).",
        ("path_class", "method", "code", "result"),
        [((name, method, str(code), result), count) for name, (method, code, result), count in ended],
    )
    yield from known("proxy_requests_in_flight", "Proxied requests under way.", traffic.under_way)
    yield _histogram(
        "proxy_request_duration_seconds",
        "Time from a proxied request's head to the end of its response, or to where it broke off. Refused requests "
        "and health checks are left out.",
        [(name, of_class.durations) for name, of_class in classes],
    )
    yield _histogram(
        "proxy_time_to_first_byte_seconds",
        "Time from a proxied request's head to the first byte of its response's body, of a WebSocket to its "
        "opening. Health checks are left out.",
        [(name, of_class.first_bytes) for name, of_class in classes],
    )
    text = "Bytes of heads and bodies that clients sent in proxied requests, counted when a request ends."
    received = [(name, of_class.request_bytes) for name, of_class in classes]
    yield counted("proxy_request_bytes", text, "path_class", received)
    text = "Bytes of heads and bodies that clients were sent in response, counted when a request ends."
    sent = [(name, of_class.response_bytes) for name, of_class in classes]
    yield counted("proxy_response_bytes", text, "path_class", sent)
    text = "Clients that left before their response was complete."
    left = sum(count for _, (_, _, result), count in ended if result == "client_left")
    yield from known("proxy_client_disconnects", text, left, counter)
    text = "Proxied requests that the engine failed."
    yield counted("proxy_upstream_errors", text, "reason", sorted(traffic.upstream_errors.items()))
    text = "Requests on the data plane that the sidecar refused, or would not read to their end."
    yield counted("proxy_refused", text, "reason", sorted(traffic.refused.items()))
    text = "Refused requests that got 503 while new ones were held for a reset, or while the sidecar stopped."
    # From 0 on: many at once, at the first reset that sheds any, are an increase and not a series that begins.
    shed = [(reason, traffic.refused.get(reason, 0)) for reason in SHED_REASONS]
    yield counted("proxy_requests_shed", text, "reason", shed)


def _histogram(name: str, text: str, series: list[tuple[str, Histogram]]) -> Metric:
    family = HistogramMetricFamily(f"highwater_{name}", text, labels=("path_class",))
    for label, one in series:
        if any(one.counts):
            bounds = (*map(floatToGoString, one.bounds), "+Inf")
            buckets = list(zip(bounds, map(float, accumulate(one.counts)), strict=True))
            family.add_metric((label,), buckets, one.total)
    return family


def connection_families(connections: Connections) -> Iterator[Metric]:
    text = "Open connections of clients; with a control_port, those of the data port."
    yield from known("proxy_connections", text, connections.clients)
    text = "Open connections to the engine: active while they serve a request, idle while they are kept for the next."
    states = [(("active",), connections.engine_active), (("idle",), connections.engine_idle)]
    yield gauge("proxy_engine_connections", text, ("state",), states)
    text = "Requests sent to the engine, by whether their connection was new or reused."
    requests = [("new", connections.requests_on_new), ("reused", connections.requests_on_reused)]
    yield counted("proxy_engine_requests", text, "connection", requests)
    text = "Requests sent to the engine once more, because a kept connection was closed before a response."
    yield from known("proxy_retries", text, connections.retries, counter)
    yield from known("proxy_tunnels", "Open WebSocket tunnels.", connections.tunnels)
