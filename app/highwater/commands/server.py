"""The process that serves: uvicorn's server around the sidecar, with additions for the data plane."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from highwater.main import Sidecar
from highwater.proxy.listeners import HANDSHAKE_SECONDS, accept_several

CANNOT_LISTEN = 3

log = logging.getLogger("highwater")


class Server(uvicorn.Server):
    """Accepts several connections a turn, ends live event streams at its stop, and reopens the log file.

    Args:
        sidecar: The application.
        host: The address or name to listen on.
        port: The port; 0 for any that is free.
        shutdown_seconds: The time that requests have to finish once it is asked to stop.
    """

    def __init__(self, sidecar: Sidecar, host: str, port: int, *, shutdown_seconds: float) -> None:
        tls = sidecar.tls
        super().__init__(
            uvicorn.Config(
                sidecar,
                host=host,
                port=port,
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the sidecar, and listen.

        Args:
            sockets: Further sockets, listened on by uvicorn itself, without a bound on TLS handshakes.
        """
        await super().startup(sockets or [])
        config, loop = self.config, asyncio.get_running_loop()
        make: Callable[[], Any] = (
            partial(  # not an asyncio.Protocol, though it has its methods: a compiled class cannot be one
                self._sidecar.protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
        )
        handshake_seconds = None if config.ssl is None else HANDSHAKE_SECONDS
        try:
            first = await loop.create_server(
                make,
                config.host,
                config.port,
                ssl=config.ssl,
                ssl_handshake_timeout=handshake_seconds,
                backlog=config.backlog,
            )
        except OSError as exc:
            log.error("cannot listen on %s port %d: %s", config.host, config.port, exc)  # noqa: TRY400 - it says all
            await self.lifespan.shutdown()
            sys.exit(CANNOT_LISTEN)
        self.servers += [first, *await accept_several([first], make, tls=config.ssl, backlog=config.backlog)]
        scheme = "http" if config.ssl is None else "https"
        for listening in first.sockets:
            host, port = listening.getsockname()[:2]
            log.info("serving on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        loop.add_signal_handler(signal.SIGHUP, self._reopen_log)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, and end the event streams: their clients would keep the process for good."""
        super().handle_exit(sig, frame)
        self._sidecar.close_streams()

    def _reopen_log(self) -> None:
        # Also without a file: the signal that rotates logs must not cut every stream.
        access_log = self._sidecar.access_log
        if access_log is not None and access_log.is_file:
            access_log.reopen()
