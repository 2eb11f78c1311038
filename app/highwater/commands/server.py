"""The process that serves: uvicorn's server around the sidecar, with additions for the data plane.

With two ports it stops in this order: the data port closes and its requests finish, while the control port still serves
probes (``/readyz``: not ready), scrapes and operators; then the control port closes; then the sidecar's tasks end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.lifespan.off import LifespanOff
from uvicorn.server import ServerState

from highwater.commands.healthcheck import PATHS, ask
from highwater.errors import os_reason
from highwater.exit_codes import CANNOT_LISTEN
from highwater.flaws import masked
from highwater.proxy.listeners import HANDSHAKE_SECONDS, accept_several
from highwater.wiring.sidecar import ListeningPort, Sidecar

# For requests to the control port if those of the data port have used up the time to stop.
CONTROL_STOP_SECONDS = 1.0
# uvicorn's main loop renews the Date of responses at each tenth tick.
_TICKS_PER_SECOND = 10
_PROBE_SECONDS = 1.0

log = logging.getLogger("highwater")


def listening_problem(exc: OSError, setting: str, host: str, port: int) -> str:
    """Return why ``host`` and ``port``, of ``setting``, cannot be listened on, the change, and what listens there."""
    if isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL:
        return (
            f"host: {masked(host)!r} is no address of this machine ({os_reason(exc)}); set host to one, to 127.0.0.1 "
            "for this machine alone, or to 0.0.0.0 for all of its addresses"
        )
    problem = f"{setting}: cannot listen on {host} port {port}: {os_reason(exc)}"
    if exc.errno == errno.EADDRINUSE:
        return f"{problem}{_listener(host, port)}; stop it, or set {setting} to a port that is free"
    if exc.errno == errno.EACCES:
        return f"{problem}; set {setting} to 1024 or above, or grant the capability NET_BIND_SERVICE"
    return f"{problem}; set {setting} to a port that is free, and host to an address of this machine"


def _listener(host: str, port: int) -> str:
    """Return what serves on a port, as far as its health paths show."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound to
    base = f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"
    if ask(base, PATHS["live"], _PROBE_SECONDS) is None:
        return " (what has it answers /livez, as a sidecar does)"
    if ask(base, "/health", _PROBE_SECONDS) is None:
        return " (what has it answers /health, as vLLM does)"
    return ""


class Server(uvicorn.Server):
    """Listens on the sidecar's ports, accepts several connections a turn, and reopens the log file."""

    def __init__(self, sidecar: Sidecar, host: str, *, shutdown_seconds: float) -> None:
        tls = sidecar.tls
        super().__init__(
            uvicorn.Config(
                sidecar,
                host=host,
                http=sidecar.protocol,  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                # The peer's address decides about calls of control paths: no header may change it.
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(shutdown_seconds),
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )
        self._sidecar = sidecar
        self._shutdown_seconds = shutdown_seconds
        # For a control port of its own, which outlives the data port.
        self._control_state = ServerState()
        self._control_servers: list[Any] = []
        self._asked_to_end = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and listen; on further ``sockets`` uvicorn itself does, without a bound on TLS handshakes."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets or [])
        *data, control = self._sidecar.ports
        try:
            if data:
                self._control_servers = await self._listen(control, self._control_state)
            for port in data or [control]:
                self.servers += await self._listen(port, self.server_state)
        except OSError:
            await self.lifespan.shutdown()
            sys.exit(CANNOT_LISTEN)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reopen_log)

    async def _listen(self, port: ListeningPort, state: ServerState) -> list[Any]:
        """Listen on one port. Raises OSError, and logs it, where that cannot be."""
        config = self.config
        # Not an asyncio.Protocol, though it has its methods: a compiled class cannot be one.
        make: Any = partial(port.protocol, config=config, server_state=state, app_state=self.lifespan.state)
        try:
            first = await asyncio.get_running_loop().create_server(
                make,
                config.host,
                port.number,
                ssl=config.ssl,
                ssl_handshake_timeout=None if config.ssl is None else HANDSHAKE_SECONDS,
                backlog=config.backlog,
            )
        except OSError as exc:
            problem = await asyncio.to_thread(listening_problem, exc, port.setting, config.host, port.number)
            log.error("%s", problem)  # noqa: TRY400 - complete without a traceback
            raise
        scheme = "http" if config.ssl is None else "https"
        for listening in first.sockets:
            host, number = listening.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            log.info("serving %s on %s://%s:%d", port.serves, scheme, name, number)
        return [first, *await accept_several([first], make, tls=config.ssl, backlog=config.backlog)]

    async def main_loop(self) -> None:
        """Run uvicorn's periodic work once a second in place of ten times, and end at once when asked to."""
        second = 0
        while not await self.on_tick(second * _TICKS_PER_SECOND):
            second += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._asked_to_end.wait()

    async def on_tick(self, counter: int) -> bool:
        """Give the control port's responses the same date as the others."""
        ends = await super().on_tick(counter)
        self._control_state.default_headers = self.server_state.default_headers
        return ends

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish, those of the data port first, and end the sidecar."""
        if self._control_servers:
            loop, lifespan = asyncio.get_running_loop(), self.lifespan
            end = loop.time() + self._shutdown_seconds
            self.lifespan = LifespanOff(self.config)  # goes on: the control port needs it
            await super().shutdown(sockets)
            self.lifespan, sockets = lifespan, None
            self.servers, self.server_state = self._control_servers, self._control_state
            self.config.timeout_graceful_shutdown = int(max(end - loop.time(), CONTROL_STOP_SECONDS))
            self._sidecar.begin_stop()  # for event streams that were opened meanwhile
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, and end the event streams: their clients would keep the process running."""
        super().handle_exit(sig, frame)
        self._sidecar.begin_stop()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._asked_to_end.set)

    def _reopen_log(self) -> None:
        # Also without a file: the signal that rotates logs must not cut every stream.
        access_log = self._sidecar.access_log
        if access_log is not None and access_log.is_file:
            access_log.reopen()
