"""The state that all requests share: the engine's connections, the gate, the limits, the clock, counters and logs."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from gated_proxy.door import Door
from gated_proxy.engine import ConnectionPool
from gated_proxy.failures import (
    ENGINE_FAULTS,
    STOPPING,
    Failure,
    body_too_large,
    head_too_large,
    loop,
    too_many_connections,
)
from gated_proxy.gate import Gate
from gated_proxy.heads import EngineOrigin, Forwarding, Mode, RequestHead
from gated_proxy.logs import AccessLog, LimitedLog, RequestRecord, printable
from gated_proxy.traffic import Connections, ProxyTraffic, Result
from gated_proxy.transports import ReadSide, WriteBatch, WriteSide

log = logging.getLogger("highwater.proxy")


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Sizes in bytes, times in seconds."""

    max_header_bytes: int = 64 * 1024  # a larger request head gets 431
    max_body_bytes: int = 256 * 1024 * 1024  # a larger request body gets 413
    connect_seconds: float = 5.0
    first_byte_seconds: float = 600.0
    """From the request's last byte to the response's head: prefill behind a queue takes minutes. 0: no limit."""
    idle_seconds: float = 600.0
    """Between two pieces of a response, of an upload or in a tunnel, whichever side is waited for. 0: no limit."""
    slow_body_seconds: float = 300.0
    """The longest wait for all pieces of an upload, and a second more for each body_bytes_per_second that came:
    trickling bytes does not extend it."""
    body_bytes_per_second: int = 512  # no link that carries images, and no live audio, is slower
    keepalive_seconds: float = 4.0
    """Idle engine connections are dropped before uvicorn, the engine's server, drops them after 5 s."""
    client_keepalive_seconds: float = 620.0  # a client's connection on which nothing happens is closed
    client_wait_seconds: float = 75.0
    """For a request's head from its first byte, for the whole body of a request to a sidecar path, and for a client to
    take a response that the sidecar made."""
    held_bytes_per_second: int = 8 * 1024
    """A complete response that waits for its client has client_wait_seconds, and a second more for so many bytes: it
    holds memory. Responses that still come from the engine are not held, and may be read as slowly as the client
    likes."""
    max_unread_bytes: int = 64 * 1024 * 1024
    """Response bytes that all clients of a port have not read; above it the clients with the most unread are cut."""
    max_connections: int | None = None
    """Clients connected at once that may send requests to the engine. None: no limit."""
    max_control_connections: int | None = None
    """Clients connected at once to a port that serves the control plane alone. None: no limit."""
    linger_seconds: float = 5.0
    """After an error that ends a connection, for the client to read it: closing on unread bytes would destroy it."""

    @property
    def tick_seconds(self) -> float:
        """The time between two checks of all clocks; no limit is kept more exactly than this."""
        shortest = min(
            self.first_byte_seconds or math.inf,
            self.idle_seconds or math.inf,
            self.keepalive_seconds,
            self.client_keepalive_seconds,
            self.client_wait_seconds,
            self.linger_seconds,
        )
        return min(max(shortest / 4, 0.005), 1.0)


class Client(Protocol):
    """A client's connection, as those see it who respond to its requests, or close it."""

    transport: asyncio.Transport
    read_side: ReadSide  # held while the client's bytes cannot be taken
    write_side: WriteSide  # the only writer to the client
    forwarding: Forwarding | None  # adds headers that name the client to the engine

    @property
    def peer(self) -> str:
        """Its address and port."""

    @property
    def unread_bytes(self) -> int:
        """The bytes written that neither the client nor its socket has taken."""

    def tick(self) -> None: ...
    def response_done(self, *, close: bool) -> None: ...
    def cut(self, *, reset: bool) -> None:
        """End the response here, incomplete; `reset` where the connection's end alone would look clean."""


class Exchange(Protocol):
    """A request to the engine that is under way."""

    def tick(self) -> None: ...
    def fail(self, failure: Failure) -> None:
        """End it, with an error for the client where one can still be sent."""


class Clients:
    """The clients connected to one port: at most ``limit``, and the error for those above it. None: no limit."""

    def __init__(self, limit: int | None, where: str, log: LimitedLog) -> None:
        self.limit = limit
        self.too_many = too_many_connections(limit or 0, where)
        self._log = log
        self._connected: set[Client] = set()

    def __len__(self) -> int:
        return len(self._connected)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._connected)

    @property
    def surplus(self) -> int:
        return 0 if self.limit is None else len(self._connected) - self.limit

    def add(self, client: Client) -> None:
        self._connected.add(client)

    def discard(self, client: Client) -> None:
        self._connected.discard(client)

    def shed_unread(self, max_bytes: int) -> None:
        """Cut the clients with the most unread bytes, where all of them together leave more than ``max_bytes``.

        The sidecar's own responses are made whole, one a connection; but connections are many, and some responses have
        megabytes.
        """
        unread = [(size, id(client), client) for client in self._connected if (size := client.unread_bytes)]
        total = sum(size for size, _, _ in unread)
        for size, _, client in sorted(unread, reverse=True):
            if total <= max_bytes:
                return
            total -= size
            self._log.warning(
                "unread",
                "%s has not read %d bytes of its responses, and all clients together left too many unread: cut",
                client.peer,
                size,
            )
            client.write_side.abort()


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
        door: Door | None = None,
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
        self.door = door or Door()
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
        self.clients = Clients(self.limits.max_connections, "(proxy.max_connections)", self._log)
        self.control_clients = Clients(self.limits.max_control_connections, "to the control port", self._log)
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
            self.access_log.write(record.line(peer, None, failure.status, 0.0))

    def head_for_engine(self, head: RequestHead, forwarding: Forwarding | None) -> bytes:
        raw = head.for_engine(self.host_line, forwarding)
        return raw if self._withhold is None else self._withhold(raw)

    def loop_failure(self, ends: object) -> Failure | None:
        return self._loop_failure if ends in self.pool.ends else None

    async def start(self) -> None:
        self._pool = ConnectionPool(
            url=self._parts,
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
