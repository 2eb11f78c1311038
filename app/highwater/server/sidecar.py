"""The sidecar as it serves: its ports, the data plane behind them, uvicorn's server, and the log lines of its start.

With two ports it stops in this order: the data port closes and its requests finish, while the control port still serves
probes (``/readyz``: not ready), scrapes and operators; then the control port closes; then the sidecar's tasks end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.lifespan.off import LifespanOff
from uvicorn.server import ServerState

from gated_proxy.allowlist import NO_ROOT_PATH, AllowList
from gated_proxy.client import ClientConnection, protocol
from gated_proxy.door import Door
from gated_proxy.gate import Gate
from gated_proxy.logs import AccessLog
from gated_proxy.proxy import Proxy, ProxyLimits
from gated_proxy.routes import ControlFront, Front, SidecarPaths
from gated_proxy.traffic import ProxyTraffic
from gated_proxy.transports import serve_on
from highwater import __version__
from highwater.http.services import Services
from highwater.model.engine import STATES
from highwater.model.policy import waters_text
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.process.errors import InternalErrors
from highwater.process.resources import control_connections, default_connections
from highwater.process.untrusted import plain
from highwater.server.settings import Settings
from highwater.watch.history import History

WAITING_SECONDS = 60.0
# For requests to the control port if those of the data port have used up the time to stop.
CONTROL_STOP_SECONDS = 1.0
# uvicorn's main loop renews the Date of responses at each tenth tick.
_TICKS_PER_SECOND = 10

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


# --- the data plane ---


@dataclass(frozen=True, slots=True)
class DataPlane:
    gate: Gate
    door: Door
    proxy: Proxy

    def requests_under_way(self) -> int:
        return len(self.proxy.exchanges)

    def dropped_lines(self) -> int:
        return 0 if self.proxy.access_log is None else self.proxy.access_log.dropped


class RootPathWatch:
    """Records once when the engine's root path, as it reports it, is another than the setting."""

    def __init__(self, front: Front, root_path: Callable[[], str | None], history: History) -> None:
        self._front = front
        self._root_path = root_path
        self._history = history
        self._reported: str | None = None

    def notice(self, report: Report) -> None:
        """Compare again: another engine may have been started."""
        problem = self._front.learn_root_path(self._root_path() if STATES[report.engine.state].is_up else None)
        if problem is not None and problem != self._reported:
            self._history.record("state", problem)
            log.warning("%s", problem)
        self._reported = problem


def wire_data_plane(
    settings: Settings,
    *,
    clocks: Clocks,
    tls: ssl.SSLContext | None,
    observer: ProxyTraffic,
    withhold: Callable[[bytes], bytes],
    internal_errors: InternalErrors,
) -> DataPlane:
    """Wire the gate, the door and the proxy; ``withhold`` takes the admin token out of what goes to the engine."""
    gate = Gate(hold_seconds=settings.gate.hold_seconds, max_held=settings.gate.max_held, clock=clocks.monotonic)
    door = Door(mode=settings.door.mode or "observe", clock=clocks.monotonic, wall=clocks.wall)
    given = settings.proxy
    has_control_port = settings.control_port is not None
    shared = {field.name for field in fields(ProxyLimits)} & type(given).model_fields.keys()
    proxy = Proxy(
        settings.engine_url,
        observer=observer,
        limits=ProxyLimits(
            **given.model_dump(include=shared - {"max_connections"}),
            max_connections=given.max_connections or default_connections(has_control_port=has_control_port),
            max_control_connections=control_connections(),
        ),
        gate=gate,
        door=door,
        tls=tls,
        access_log=None if settings.access_log is None else AccessLog(settings.access_log),
        forwarded=settings.proxy.forwarded,
        root_path=_root_path(settings),
        withhold=withhold,
        internal_error=internal_errors.counter("proxy"),
    )
    return DataPlane(gate, door, proxy)


def make_front(settings: Settings, paths: SidecarPaths) -> Front:
    allowed = AllowList(settings.proxy.extra_paths, _root_path(settings))
    return Front(paths, allowed, has_control_port=settings.control_port is not None)


def _root_path(settings: Settings) -> str | None:
    return None if settings.engine_root_path is None else settings.engine_root_path.removesuffix(NO_ROOT_PATH)


def listening_ports(settings: Settings, proxy: Proxy, front: Front, paths: SidecarPaths) -> tuple[ListeningPort, ...]:
    """Return the ports to listen on, the one with the control plane last."""
    if settings.has_data_plane and settings.control_port is None:
        return (ListeningPort("port", settings.port, "data plane and control plane", protocol(proxy, front)),)
    if settings.has_data_plane:
        elsewhere = f"which is the control port: what the engine serves is on port {settings.port} (port)"
    else:
        why = why_no_data_plane(settings)
        elsewhere = f"and no request is passed on ({why}): send it to the engine itself"
    control = ListeningPort(
        "port" if settings.control_port is None else "control_port",
        settings.control_plane_port,
        "the control plane",
        protocol(proxy, ControlFront(paths, elsewhere), proxy.control_clients),
    )
    if not settings.has_data_plane:
        return (control,)
    return (ListeningPort("port", settings.port, "the data plane", protocol(proxy, front)), control)


# --- the server ---


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
