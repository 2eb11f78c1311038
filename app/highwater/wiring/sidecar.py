"""The wired sidecar, as the server runs it."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from highwater.api.services import Services
from highwater.proxy.access_log import AccessLog
from highwater.proxy.client import ClientConnection


class ListeningPort(NamedTuple):
    """A port to listen on.

    Attributes:
        setting: The setting that names it.
        number: Its number.
        serves: What is served there, for the log.
        protocol: Makes uvicorn's protocol for each connection (``http=``).
    """

    setting: Literal["port", "control_port"]
    number: int
    serves: str
    protocol: Callable[..., ClientConnection]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The wired application: an ASGI application for the sidecar's paths, and the ports in front of it.

    Attributes:
        ports: The last one serves the control plane. One before it serves the engine's paths alone.
        services: The parts, for tests and benchmarks.
        sidecar_paths: The paths that the ASGI application serves.
        begin_stop: Ends every live event stream, and lets ``/readyz`` say that the sidecar stops; the server calls it
            when it is asked to stop, because it waits for open connections.
        control: The ASGI application.
        tls: For clients' connections; None: plain HTTP.
        access_log: Gets a line for each request that ended; None: disabled.
    """

    ports: tuple[ListeningPort, ...]
    services: Services
    sidecar_paths: frozenset[str]
    begin_stop: Callable[[], None]
    control: ASGIApp
    tls: ssl.SSLContext | None
    access_log: AccessLog | None

    @property
    def protocol(self) -> Callable[..., ClientConnection]:
        """The protocol of the first port."""
        return self.ports[0].protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the lifespan and the sidecar's paths."""
        await self.control(scope, receive, send)
