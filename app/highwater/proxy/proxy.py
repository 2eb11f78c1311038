"""The state that all requests share: the engine's connections, the gate, the limits, the clock, counters and logs."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from highwater.process.limited_log import LimitedLog, printable
from highwater.proxy.access_log import AccessLog, RequestRecord
from highwater.proxy.clients import Clients
from highwater.proxy.failures import (
    ENGINE_FAULTS,
    STOPPING,
    Failure,
    body_too_large,
    head_too_large,
    loop,
    too_many_connections,
)
from highwater.proxy.forwarded import Forwarding, Mode
from highwater.proxy.gate import Gate
from highwater.proxy.limits import ProxyLimits
from highwater.proxy.request_head import RequestHead
from highwater.proxy.response_head import EngineOrigin
from highwater.proxy.roles import Client, Exchange
from highwater.proxy.traffic import Connections, ProxyTraffic, Result
from highwater.proxy.transports import WriteBatch
from highwater.proxy.upstream import ConnectionPool, port_of

log = logging.getLogger("highwater.proxy")


class Proxy:
    """The engine, as its clients see it; ``upstream`` is ``http://host:port``, ``https://host:port`` or ``unix:/path``.

    Args:
        tls: For an engine on https; the system's authorities where ``None``.
        withhold: Removes the lines of each request's head that are not for the engine.

    Attributes:
        exchanges: The requests under way.
        clients: Of the port that requests for the engine come to; ``control_clients``: of the control plane's own.
    """

    def __init__(
        self,
        upstream: str,
        *,
        observer: ProxyTraffic,
        limits: ProxyLimits | None = None,
        gate: Gate | None = None,
        tls: ssl.SSLContext | None = None,
        access_log: AccessLog | None = None,
        forwarded: Mode = "pass",
        root_path: str | None = None,
        withhold: Callable[[bytes], bytes] | None = None,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._internal_error = internal_error
        parts = urlsplit(upstream)
        if parts.scheme not in ("http", "https", "unix") or not (parts.hostname or parts.path):
            raise ValueError(f"upstream {upstream!r}: must be http://host:port, https://host:port or unix:/path")
        self._parts = parts
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        # Over a Unix socket the host is only a name for the Host header.
        authority = parts.netloc or "localhost"
        self.host_line = b"host: %b\r\n" % authority.encode()
        self._origin = EngineOrigin(authority, root_path or "")
        self.forwarded = forwarded
        self.observer = observer
        self.access_log = access_log
        self.tunnels = self.requests_on_new = self.requests_on_reused = 0
        self._log = LimitedLog(log)
        self.gate = gate or Gate()
        self._withhold = withhold
        self.limits = limits or ProxyLimits()
        self.body_too_large = body_too_large(self.limits.max_body_bytes)
        self._loop_failure = loop(upstream)
        self.head_too_large = head_too_large(self.limits.max_header_bytes)
        self.first_byte_ticks = self._ticks(self.limits.first_byte_seconds)
        self.idle_ticks = self._ticks(self.limits.idle_seconds)
        self.client_idle_ticks = self._ticks(self.limits.client_keepalive_seconds)
        self.client_ticks = self._ticks(self.limits.client_wait_seconds)
        self.linger_ticks = self._ticks(self.limits.linger_seconds)
        self.exchanges: set[Exchange] = set()
        limit, control_limit = self.limits.max_connections, self.limits.max_control_connections
        too_many = too_many_connections(limit or 0, "(proxy.max_connections)")
        too_many_control = too_many_connections(control_limit or 0, "to the control port")
        self.clients = Clients(limit, too_many, self._log)
        self.control_clients = Clients(control_limit, too_many_control, self._log)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pool: ConnectionPool | None = None
        self.write_batch = WriteBatch()

    def _ticks(self, seconds: float) -> float:
        return math.ceil(seconds / self.limits.tick_seconds) if seconds else math.inf

    @property
    def pool(self) -> ConnectionPool:
        """The connections to the engine, between ``start`` and ``aclose``; raises RuntimeError elsewhere."""
        if self._pool is None:
            raise RuntimeError("the proxy has not been started")
        return self._pool

    def connections(self) -> Connections:
        pool = self._pool
        return Connections(
            clients=len(self.clients),
            engine_active=0 if pool is None else pool.active,
            engine_idle=0 if pool is None else pool.idle,
            tunnels=self.tunnels,
            requests_on_new=self.requests_on_new,
            requests_on_reused=self.requests_on_reused,
            retries=0 if pool is None else pool.retries,
        )

    def report(self, failure: Failure, head: RequestHead, peer: str, result: Result) -> None:
        """Count a failure, and log it at a bounded rate: without the query, which may hold a secret.

        The head is empty where it could not be read. A response that was cut was not refused.
        """
        if failure.status in ENGINE_FAULTS:
            self.observer.upstream_error(failure.reason)
        elif result == "refused":
            self.observer.request_refused(failure.reason)
        self._log.warning(
            failure.reason,
            "%s %s: %s, request_id=%s, peer=%s",
            printable(head.method) or "-",
            printable(head.path) or "-",
            printable(failure.message),
            head.request_id().decode(),
            peer,
        )

    def refused(self, failure: Failure, head: RequestHead, peer: str, response_bytes: int) -> None:
        self.report(failure, head, peer, "refused")
        if self.access_log is not None:
            record = RequestRecord(head)
            record.result, record.reason, record.response_bytes = "refused", failure.reason, response_bytes
            self.access_log.write(record.ended(peer, None, failure.status, 0.0))

    def head_for_engine(self, head: RequestHead, forwarding: Forwarding | None) -> bytes:
        raw = head.for_engine(self.host_line, forwarding)
        return raw if self._withhold is None else self._withhold(raw)

    def loop_failure(self, ends: Any) -> Failure | None:  # noqa: ANN401 - addresses of any family
        return self._loop_failure if ends in self.pool.ends else None

    async def start(self) -> None:
        self._pool = ConnectionPool(
            host=self._parts.hostname or "",
            port=port_of(self._parts),
            socket_path=self._parts.path if self._parts.scheme == "unix" else None,
            tls=self._tls,
            write_batch=self.write_batch,
            connect_seconds=self.limits.connect_seconds,
            keepalive_seconds=self.limits.keepalive_seconds,
            origin=self._origin,
        )
        self._tick()

    async def aclose(self) -> None:
        for exchange in list(self.exchanges):
            exchange.fail(STOPPING)
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        await asyncio.sleep(0)  # closed transports notify their protocols in the next turn
        if self.access_log is not None:
            self.access_log.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tick(self) -> None:
        """Check every deadline: a timer per request would cost more than the request's own bookkeeping."""
        self._timer = asyncio.get_running_loop().call_later(self.limits.tick_seconds, self._tick)
        self.pool.sweep()
        for clients in (self.clients, self.control_clients):
            clients.shed_unread(self.limits.max_unread_bytes)
        timed: list[Exchange | Client] = [*self.exchanges, *self.clients, *self.control_clients]
        for each in timed:
            try:
                each.tick()
            except Exception:
                # Broad: one connection's fault must not stop the deadlines of all others. It is logged and counted.
                self._internal_error()
                log.exception("a connection's deadlines could not be checked")
