"""What all requests share: the way to the engine, the gate, the limits, the clock, what is counted and logged."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.access_log import AccessLog, EndedRequest
from app.gate import Gate
from app.limited_log import LimitedLog, printable
from app.proxy.failures import (
    ENGINE_FAULTS,
    STOPPING,
    Failure,
    body_too_large,
    head_too_large,
    too_many_connections,
)
from app.proxy.forwarded import Forwarding, Mode
from app.proxy.heads import EngineOrigin, RequestHead
from app.proxy.limits import ProxyLimits, ProxyObserver
from app.proxy.transports import Turn
from app.proxy.upstream import Pool
from app.traffic import Connections, Result

log = logging.getLogger("app.proxy")

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Timed(Protocol):
    """Looks at its clock when it is told to."""

    def tick(self) -> None:
        """A while has passed."""


class Connected(Timed, Protocol):
    """A client's connection."""

    @property
    def peer(self) -> str:
        """Its address and port."""

    @property
    def unread_bytes(self) -> int:
        """Written to it, and not taken yet."""

    def drop(self) -> None:
        """Close at once; what was not taken is lost."""


class Ending(Timed, Protocol):
    """Can be made to end."""

    def fail(self, failure: Failure) -> None:
        """End now, for this reason."""


class Proxy:
    """The engine, as far as its clients can tell.

    Args:
        upstream: the engine: ``http://host:port``, ``https://host:port`` or ``unix:/path``.
        observer: counts requests, times and failures.
        limits: sizes and times.
        gate: lets requests through that can reach the model, and holds them while a reset needs stillness.
        tls: for an engine on https; the system's authorities where ``None``.
        access_log: gets a line for each request that ended; disabled where ``None``.
        forwarded: what the engine is told of where a request came from.
        root_path: the engine's.
        withhold: takes out of each request's head what is not for the engine.

    Attributes:
        exchanges: under way.
        clients: connected.
        tunnels: open ones.
        requests_on_new: requests sent over a connection opened for them.
        requests_on_reused: requests sent over a connection that had served another one.
    """

    def __init__(
        self,
        upstream: str,
        *,
        observer: ProxyObserver,
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
        self.head_too_large = head_too_large(self.limits.max_header_bytes)
        self.too_many_connections = too_many_connections(self.limits.max_connections or 0)
        self.first_byte_ticks = self._ticks(self.limits.first_byte_seconds)
        self.idle_ticks = self._ticks(self.limits.idle_seconds)
        self.client_idle_ticks = self._ticks(self.limits.client_keepalive_seconds)
        self.client_ticks = self._ticks(self.limits.client_wait_seconds)
        self.linger_ticks = self._ticks(self.limits.linger_seconds)
        self.exchanges: set[Ending] = set()
        self.clients: set[Connected] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pool: Pool | None = None
        self._turn: Turn | None = None

    def _ticks(self, seconds: float | None) -> float:
        return math.inf if seconds is None else math.ceil(seconds / self.limits.tick_seconds)

    @property
    def crowd(self) -> int:
        """How many more clients are connected than may be; 0 or less: none."""
        limit = self.limits.max_connections
        return 0 if limit is None else len(self.clients) - limit

    @property
    def pool(self) -> Pool:
        """There is one between ``start`` and ``aclose``."""
        if self._pool is None:
            raise RuntimeError("the proxy has not been started")
        return self._pool

    @property
    def turn(self) -> Turn:
        """The loop's; there is one from ``start`` on."""
        if self._turn is None:
            raise RuntimeError("the proxy has not been started")
        return self._turn

    def connections(self) -> Connections:
        """What there is now, and what has been sent so far."""
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

        Args:
            failure: what happened.
            head: the request's; an empty one where it could not be read.
            peer: the client.
            result: how the request ended; a response that was cut was not refused.
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
        """Count and log a request that was answered with an error before anybody took it on.

        Args:
            failure: what the client was told.
            head: the request's; an empty one where it could not be read.
            peer: the client.
            response_bytes: of the answer.
        """
        self.report(failure, head, peer, "refused")
        self.log_ended(
            head,
            peer,
            None,
            failure.status,
            result="refused",
            reason=failure.reason,
            request_bytes=0,
            response_bytes=response_bytes,
        )

    def log_ended(
        self,
        head: RequestHead,
        peer: str,
        path_class: str | None,
        status: int,
        *,
        result: Result,
        reason: str | None,
        request_bytes: int,
        response_bytes: int,
        seconds: float = 0.0,
        first_byte_seconds: float | None = None,
        held_seconds: float = 0.0,
        reused: bool | None = None,
    ) -> None:
        """Write a line of the access log, where there is one; the request's bytes are those behind its head."""
        if self.access_log is not None:
            ended = EndedRequest(
                peer=peer,
                method=printable(head.method) or None,
                path=printable(head.path) or None,
                path_class=path_class,
                status=status,
                result=result,
                reason=reason,
                request_id=head.request_id().decode(),
                request_bytes=len(head.raw) + request_bytes,
                response_bytes=response_bytes,
                duration_seconds=seconds,
                time_to_first_byte_seconds=first_byte_seconds,
                held_seconds=held_seconds,
                engine_connection_reused=reused,
            )
            self.access_log.write(ended)

    def head_for_engine(self, head: RequestHead, forwarding: Forwarding | None) -> bytes:
        """A request's head as the engine gets it."""
        raw = head.for_engine(self.host_line, forwarding)
        return raw if self._withhold is None else self._withhold(raw)

    async def start(self) -> None:
        """Open the connection pool; nothing is sent yet."""
        self._turn = Turn()
        is_unix = self._parts.scheme == "unix"
        self._pool = Pool(
            host=self._parts.hostname or "",
            port=self._parts.port or _DEFAULT_PORTS.get(self._parts.scheme, 0),
            socket_path=self._parts.path if is_unix else None,
            tls=self._tls,
            turn=self.turn,
            connect_seconds=self.limits.connect_seconds,
            keepalive_seconds=self.limits.keepalive_seconds,
            origin=self._origin,
        )
        self._tick()

    async def aclose(self) -> None:
        """Cut what is still under way, and close every connection to the engine, and the access log."""
        for exchange in list(self.exchanges):
            exchange.fail(STOPPING)
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        await asyncio.sleep(0)  # closed transports tell their protocols in the next turn
        if self.access_log is not None:
            self.access_log.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that must wait."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _shed_unread(self) -> None:
        """Cut the clients that leave most unread, where all of them together leave too much.

        An answer of the sidecar's own is made whole, and one connection has one of them at most; but connections are
        many, and some answers have megabytes.
        """
        unread = [(size, id(client), client) for client in self.clients if (size := client.unread_bytes)]
        total = sum(size for size, _, _ in unread)
        for size, _, client in sorted(unread, reverse=True):
            if total <= self.limits.max_unread_bytes:
                return
            total -= size
            self._log.warning(
                "unread",
                "%s has not read %d bytes of its answers, and all clients together too much: cut",
                client.peer,
                size,
            )
            client.drop()

    def _tick(self) -> None:
        """One look at every clock: a timer per request would cost more than the request's own bookkeeping."""
        self._timer = asyncio.get_running_loop().call_later(self.limits.tick_seconds, self._tick)
        self.pool.sweep()
        self._shed_unread()
        for ticks in (*self.exchanges, *self.clients):
            try:
                ticks.tick()
            except Exception:
                # Broad: one connection's fault must not take every other one's deadlines away. It is logged each time,
                # and counted.
                self._internal_error()
                log.exception("a connection's clock could not be looked at")
