"""What all requests share: the way to the engine, the gate, the limits, the clock, and who counts."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.gate import Gate
from app.proxy.failures import STOPPING, Failure, body_too_large, head_too_large
from app.proxy.heads import RequestHead
from app.proxy.limits import ProxyLimits, ProxyObserver
from app.proxy.transports import Turn
from app.proxy.upstream import Pool

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Timed(Protocol):
    """Looks at its clock when it is told to."""

    def tick(self) -> None:
        """A while has passed."""


class Ending(Timed, Protocol):
    """Can be made to end."""

    def fail(self, failure: Failure) -> None:
        """End now, for this reason."""


class Proxy:
    """The engine, as far as its clients can tell.

    Args:
        upstream: the engine: ``http://host:port``, ``https://host:port`` or ``unix:/path``.
        observer: who counts requests, times and failures.
        limits: sizes and times.
        gate: lets requests through that can reach the model, and holds them while a reset needs stillness.
        tls: for an engine on https; the system's authorities where ``None``.
        withhold: takes out of each request's head what is not for the engine.

    Attributes:
        exchanges: under way.
        clients: connected.
    """

    def __init__(
        self,
        upstream: str,
        *,
        observer: ProxyObserver,
        limits: ProxyLimits | None = None,
        gate: Gate | None = None,
        tls: ssl.SSLContext | None = None,
        withhold: Callable[[bytes], bytes] | None = None,
    ) -> None:
        parts = urlsplit(upstream)
        if parts.scheme not in ("http", "https", "unix") or not (parts.hostname or parts.path):
            raise ValueError(f"upstream {upstream!r}: must be http://host:port, https://host:port or unix:/path")
        self._parts = parts
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        # Over a Unix socket the host is only a name for the Host header.
        self.host_line = b"host: %b\r\n" % (parts.netloc or "localhost").encode()
        self.observer = observer
        self.gate = gate or Gate()
        self._withhold = withhold
        self.limits = limits or ProxyLimits()
        self.body_too_large = body_too_large(self.limits.max_body_bytes)
        self.head_too_large = head_too_large(self.limits.max_header_bytes)
        self.first_byte_ticks = self._ticks(self.limits.first_byte_seconds)
        self.idle_ticks = self._ticks(self.limits.idle_seconds)
        self.client_ticks = self._ticks(self.limits.client_keepalive_seconds)
        self.linger_ticks = self._ticks(self.limits.linger_seconds)
        self.exchanges: set[Ending] = set()
        self.clients: set[Timed] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pool: Pool | None = None
        self._turn: Turn | None = None

    def _ticks(self, seconds: float | None) -> float:
        return math.inf if seconds is None else math.ceil(seconds / self.limits.tick_seconds)

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

    def head_for_engine(self, head: RequestHead) -> bytes:
        """A request's head as the engine gets it."""
        raw = head.for_engine(self.host_line)
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
        )
        self._tick()

    async def aclose(self) -> None:
        """Cut what is still under way, and close every connection to the engine."""
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

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that must wait."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tick(self) -> None:
        """One look at every clock: a timer per request would cost more than the request's own bookkeeping."""
        for exchange in list(self.exchanges):
            exchange.tick()
        for client in list(self.clients):
            client.tick()
        self.pool.sweep()
        self._timer = asyncio.get_running_loop().call_later(self.limits.tick_seconds, self._tick)
