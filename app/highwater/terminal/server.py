"""The process that serves: uvicorn's server around the sidecar, with additions for the data plane.

With two ports it stops in this order: the data port closes and its requests finish, while the control port still serves
probes (``/readyz``: not ready), scrapes and operators; then the control port closes; then the sidecar's tasks end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType

import uvicorn
from uvicorn.lifespan.off import LifespanOff
from uvicorn.server import ServerState

from gated_proxy.transports import serve_on
from highwater.server.sidecar import ListeningPort, Sidecar

# For requests to the control port if those of the data port have used up the time to stop.
CONTROL_STOP_SECONDS = 1.0
# uvicorn's main loop renews the Date of responses at each tenth tick.
_TICKS_PER_SECOND = 10

log = logging.getLogger("highwater")


class Server(uvicorn.Server):
    """Serves on sockets that listen already, by the setting that names their port, and reopens the log file.

    It accepts several connections a turn.
    """

    def __init__(
        self, sidecar: Sidecar, listening: Mapping[str, Sequence[socket.socket]], *, shutdown_seconds: float
    ) -> None:
        tls = sidecar.tls
        super().__init__(
            uvicorn.Config(
                sidecar,
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
        self._listening = listening
        self._shutdown_seconds = shutdown_seconds
        # For a control port of its own, which outlives the data port.
        self._control_state = ServerState()
        self._control_servers: list[asyncio.Server] = []
        self._asked_to_end = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and serve; on further ``sockets`` uvicorn itself does, without a bound on TLS handshakes."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets or [])
        *data, control = self._sidecar.ports
        if data:
            self._control_servers = await self._serve_on(control, self._control_state)
        for port in data or [control]:
            self.servers += await self._serve_on(port, self.server_state)
        self._loop.add_signal_handler(signal.SIGHUP, self._reopen_log)

    async def _serve_on(self, port: ListeningPort, state: ServerState) -> list[asyncio.Server]:
        config, listening = self.config, self._listening[port.setting]
        make = partial(port.protocol, config=config, server_state=state, app_state=self.lifespan.state)
        servers = await serve_on(listening, make, tls=config.ssl, backlog=config.backlog)
        scheme = "http" if config.ssl is None else "https"
        for each in listening:
            host, number = each.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            log.info("serving %s on %s://%s:%d", port.serves, scheme, name, number)
        return servers

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
