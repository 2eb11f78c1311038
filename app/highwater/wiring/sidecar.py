"""The wired sidecar, as the server runs it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from gated_proxy.client import ClientConnection
from gated_proxy.logs import AccessLog
from highwater.api.services import Services


class ListeningPort(NamedTuple):
    """A port to listen on: the setting that names it, what is served there (for the log), and uvicorn's ``http=``."""

    setting: Literal["port", "control_port"]
    number: int
    serves: str
    protocol: Callable[..., ClientConnection]


class Loops:
    """Coroutines that run until cancelled, started and ended together."""

    def __init__(self, *loops: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loops = loops
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(loop(), name=loop.__qualname__) for loop in self._loops]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def alive(self) -> bool:
        return not any(task.done() for task in self._tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The wired application: an ASGI application for the sidecar's paths, and the ports in front of it.

    The last port serves the control plane; one before it serves the engine's paths alone. The server calls
    ``begin_stop`` when it is to stop, because it waits for open connections: it ends live event streams, and
    ``/readyz`` reports the stop.
    """

    ports: tuple[ListeningPort, ...]
    services: Services
    sidecar_paths: frozenset[str]
    begin_stop: Callable[[], None]
    control: ASGIApp
    tls: ssl.SSLContext | None  # None: plain HTTP
    access_log: AccessLog | None  # None: disabled

    @property
    def protocol(self) -> Callable[..., ClientConnection]:
        return self.ports[0].protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.control(scope, receive, send)
