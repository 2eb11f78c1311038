"""The wired sidecar, as the server runs it, and the log lines of its start."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from gated_proxy.client import ClientConnection
from gated_proxy.logs import AccessLog
from highwater import __version__
from highwater.http.services import Services
from highwater.model.policy import waters_text
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.process.untrusted import plain
from highwater.server.settings import Settings

WAITING_SECONDS = 60.0

log = logging.getLogger("highwater")


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
        started = [loop() for loop in self._loops]
        self._tasks = [asyncio.create_task(one, name=getattr(one, "__qualname__", None)) for one in started]

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


# --- the log lines of its start ---


def start_line(settings: Settings, *, is_compiled: bool = False) -> str:
    own = "waters from the engine's own plan"
    rules = [f"{rule.name} ({rule.signal}, {waters_text(rule) or own})" for rule in settings.policy.rules]
    data_plane = f"data plane: {'compiled' if is_compiled else 'pure Python'}"
    if not settings.has_data_plane:
        data_plane = f"no requests are passed on to the engine: {why_no_data_plane(settings)}"
    file = settings.admin_token_file
    needed = " (highwater token prints it)" if file is None else f" in {file}"
    if settings.trust_loopback:
        needed = ", but from this machine (trust_loopback)"
    elif settings.admin_token is not None:
        needed = " (admin_token)"
    parts = [
        f"engine {settings.engine_url}",
        data_plane,
        f"policy {settings.policy.mode}: {'; '.join(rules) or 'no rules'}",
        f"control calls need the admin token{needed}",
        f"recorders {f'in {settings.recorder_dir}' if settings.recorder_dir else 'disabled (recorder_dir)'}",
        f"incidents {f'in {settings.incidents.folder}' if settings.incidents.folder else 'in memory only'}",
    ]
    return plain(f"highwater {__version__}: {', '.join(parts)}")


def why_no_data_plane(settings: Settings) -> str:
    if settings.proxy.enabled is False:
        return "proxy.enabled is false"
    return (
        "recorder_dir is set, and neither engine_url nor another setting that concerns requests; with "
        "proxy.enabled=true they are passed on"
    )


class WaitingLog:
    """Logs what is waited for: at the first report, and each minute without an engine that serves requests."""

    def __init__(self, clocks: Clocks) -> None:
        self._clock = clocks.monotonic
        self._next = self._delay = 0.0
        self._since: float | None = None

    def notice(self, report: Report) -> None:
        engine, now = report.engine, self._clock()
        if engine.traits.serves:
            self._since, self._delay = None, WAITING_SECONDS
            return
        if self._since is None:
            self._since, self._next = now, now + self._delay
        if now < self._next:
            return
        self._next = now + WAITING_SECONDS
        lasted = f" for {now - self._since:.0f} s" if now > self._since else ""
        why = f": {engine.hint}" if engine.hint else ""
        log.info("waiting%s for the engine at %s (%s)%s", lasted, engine.url, engine.state_text, why)
