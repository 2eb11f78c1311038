"""The one place that wires: settings in, an ASGI application out. The lifespan owns every task.

::

    request ──► Front decides ──┬── sidecar path ──► FastAPI (api/) ──► poller, governor, history, exporter
                                ├── admitted by the allow list ──► Proxy ──► engine
                                └── anything else ──► 404 or 403, naming the setting that would allow it

With ``control_port`` the first way is on that port alone, and the second one on ``port``; without a data plane there is
no second one. Both ports share one ``Proxy``, with a limit of clients each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from highwater import __version__
from highwater.api.access import Access, ControlGuard
from highwater.api.body_limit import BodyLimit
from highwater.api.budget import budget_router
from highwater.api.control import control_router
from highwater.api.dashboard import dashboard_router
from highwater.api.engine_page import EnginePage
from highwater.api.head import HeadAsGet
from highwater.api.health import health_router
from highwater.api.incidents import incidents_router
from highwater.api.memory import memory_router
from highwater.api.metrics import Exporter
from highwater.api.plan import plan_router
from highwater.api.policy import policy_router
from highwater.api.problems import PROBLEM_RESPONSES, answer_problems
from highwater.api.runbooks import PREFIX as RUNBOOKS_PREFIX
from highwater.api.runbooks import runbooks_router
from highwater.api.services import Services
from highwater.api.snapshots import snapshots_router
from highwater.engine.client import Engine
from highwater.engine.life import Lives, local_start
from highwater.files.admin_token import AdminToken, default_token_file
from highwater.files.state_file import StateFile
from highwater.files.tls import TlsWatch, engine_context, listening_context
from highwater.incidents import Incidents, IncidentStore
from highwater.incidents.oom_kills import OomKillWatch
from highwater.incidents.watcher import IncidentWatcher
from highwater.memory.engine_budgets import EngineBudgets
from highwater.memory.history import History
from highwater.memory.poller import Poller
from highwater.memory.shared_devices import SharedDevices, find_nvml
from highwater.memory.snapshots import Snapshots
from highwater.memory.sources import all_sources
from highwater.memory.sources.encoder_cache import EncoderCacheEntries
from highwater.policy.governor import Governor
from highwater.policy.store import PolicyStore
from highwater.process.descriptors import control_connections, default_connections
from highwater.proxy.access_log import AccessLog
from highwater.proxy.allowlist import AllowList
from highwater.proxy.client import ClientConnection, protocol
from highwater.proxy.front import ControlFront, Front, SidecarPaths
from highwater.proxy.gate import Gate
from highwater.proxy.limits import ProxyLimits
from highwater.proxy.proxy import Proxy
from highwater.readings import EventKind, Report
from highwater.recorder.recorders import Recorders
from highwater.relief import Quiescer, Relief
from highwater.relief.remedies import all_remedies
from highwater.settings import Settings
from highwater.units import MIB

log = logging.getLogger("highwater")

CONTROL_BODY_BYTES = MIB
_LIVE_PATHS = frozenset({"/memory/events"})
_SIDECAR_PREFIXES = ("/memory/incidents/", "/memory/snapshots/", "/dashboard/", RUNBOOKS_PREFIX)
NO_DATA_PLANE = (
    "requests cannot be held here: this sidecar has no data plane (proxy.enabled). With one, and all traffic through "
    "it, they can"
)
MAX_HISTORY_SAMPLES = 86_400  # a day at one a second: 120 MB with eight ranks


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


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The wired application: an ASGI application for the sidecar's paths, and the ports in front of it.

    Attributes:
        ports: The last one serves the control plane. One before it serves the engine's paths alone.
        services: The parts, for tests and benchmarks.
        sidecar_paths: The paths that the ASGI application serves.
        begin_stop: Ends every live event stream, and lets ``/readyz`` say that the sidecar stops; the server calls it
            when it is asked to stop, because it waits for open connections.
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


class RootPathWatch:
    """Tells once when the engine's root path is another than the setting.

    Args:
        front: Judges by it.
        root_path: What the engine says of it; looked at after every poll.
        history: Keeps the event.
    """

    def __init__(self, front: Front, root_path: Callable[[], str | None], history: History) -> None:
        self._front = front
        self._root_path = root_path
        self._history = history
        self._reported: str | None = None

    def notice(self, _: Report) -> None:
        """Look again: another engine may have been started."""
        problem = self._front.learn_root_path(self._root_path())
        if problem is not None and problem != self._reported:
            self._history.record("state", problem)
            log.warning("%s", problem)
        self._reported = problem


class Loops:
    """The tasks that run as long as the sidecar does.

    Args:
        loops: Coroutine functions that run until cancelled.
    """

    def __init__(self, *loops: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loops = loops
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every loop."""
        self._tasks = [asyncio.create_task(loop(), name=loop.__qualname__) for loop in self._loops]

    async def stop(self) -> None:
        """Cancel every loop, and return when all have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def alive(self) -> bool:
        """Whether none has ended."""
        return not any(task.done() for task in self._tasks)


def create_app(
    settings: Settings,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Sidecar:
    """Wire a sidecar.

    Args:
        settings: All of them.
        clock: Monotonic seconds: everything that waits or measures. Where the recorders' files are read it must be
            ``CLOCK_MONOTONIC``, which the workers of this machine share.
        wall_clock: Unix seconds: everything that is told to people.
        transport: Replaces the network towards the engine on the control plane, in tests.
    """
    tls = listening_context(settings.tls.files)
    engine_tls = engine_context(settings.engine_url, settings.engine_tls.files)
    engine = Engine(
        settings.engine_url,
        rpc_deadline_seconds=settings.rpc_deadline_seconds,
        ssl_context=engine_tls,
        transport=transport,
        clock=clock,
    )
    history = History(
        min(int(settings.history_seconds / settings.poll_seconds) + 1, MAX_HISTORY_SAMPLES),
        clock=wall_clock,
        monotonic=clock,
    )
    state = StateFile(settings.state_file)
    policy = PolicyStore(state, settings.policy)
    _record_startup(history, ("recovery", state.problem), ("policy", policy.news))
    gate = Gate(hold_seconds=settings.gate.hold_seconds, max_held=settings.gate.max_held, clock=clock)
    # The parts that count are made before the parts that are counted: hence the late looks.
    exporter = Exporter(
        lambda: poller.current(),  # noqa: PLW0108
        lambda: governor.status(),  # noqa: PLW0108
        held=lambda: gate.held,
        connections=lambda: proxy.connections(),  # noqa: PLW0108
        dropped_lines=lambda: 0 if proxy.access_log is None else proxy.access_log.dropped,
        incidents=lambda: incidents.counts,
    )
    budgets = EngineBudgets(engine)
    recorders = _recorders(settings, engine, lambda: len(proxy.exchanges), clock, wall_clock)
    poller = Poller(
        engine,
        all_sources(engine, budgets),
        history,
        poll_seconds=settings.poll_seconds,
        idle_poll_seconds=settings.idle_poll_seconds,
        stale_seconds=settings.stale_seconds,
        engine_has_extension=settings.engine_has_extension,
        observer=exporter,
        recorders=recorders,
        requests_under_way=lambda: len(proxy.exchanges),
        lives=Lives(state, started_at=local_start()),
        max_step_seconds=settings.max_step_seconds,
        clock=clock,
        wall_clock=wall_clock,
        internal_error=exporter.internal_errors.counter("poller"),
    )
    shared = SharedDevices(
        poller.current,
        history,
        recorders=None if recorders is None else recorders.recorder,
        nvml=find_nvml(),
        internal_error=exporter.internal_errors.counter("shared_devices"),
    )
    quiescer = Quiescer(
        engine,
        gate,
        drain_seconds=settings.gate.drain_seconds,
        impossible=None if settings.has_data_plane else NO_DATA_PLANE,
        clock=clock,
    )
    relief = Relief(
        engine,
        poller,
        history,
        quiescer,
        remedies=all_remedies(host_budget_bytes=settings.trim.host_budget_bytes),
        observer=exporter,
        clock=clock,
    )
    governor = Governor(
        relief,
        poller,
        history,
        rules=[rule.rule() for rule in policy.in_force.rules],
        mode=policy.in_force.mode,
        shared_cards=lambda: shared.cards,
        observer=exporter,
        clock=clock,
        wall_clock=wall_clock,
        internal_error=exporter.internal_errors.counter("policy"),
    )
    incidents = _incidents(settings, clock, wall_clock, exporter.internal_errors.counter("diagnosis"))
    box = IncidentWatcher(
        incidents,
        history,
        recorders=recorders,
        life=lambda: poller.life,
        policy=governor.status,
        oom_kills=OomKillWatch(clock=clock),
        internal_error=exporter.internal_errors.counter("incidents"),
    )
    poller.listeners += [quiescer.notice, governor.notice, box.notice]
    poller.pace = governor.poll_interval
    token, access = _access(settings, exporter)
    proxy = Proxy(
        settings.engine_url,
        observer=exporter.traffic,
        limits=_limits(settings),
        gate=gate,
        tls=engine_tls,
        access_log=None if settings.access_log is None else AccessLog(settings.access_log),
        forwarded=settings.proxy.forwarded,
        root_path=settings.engine_root_path,
        withhold=access.without_token,
        internal_error=exporter.internal_errors.counter("proxy"),
    )
    loops = Loops(
        poller.run, governor.run, box.run, TlsWatch(tls, engine_tls).run, *([shared.run] if shared.has_witness else [])
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        token.start()
        await proxy.start()
        loops.start()
        try:
            yield
        finally:
            history.close()
            await box.finish()
            await loops.stop()
            incidents.close()
            if recorders is not None:
                recorders.close()
            await proxy.aclose()
            await engine.aclose()
            token.close()

    stopping = asyncio.Event()
    services = Services(
        poller=poller,
        governor=governor,
        relief=relief,
        policy=policy,
        history=history,
        exporter=exporter,
        engine_page=EnginePage(engine),
        entries=EncoderCacheEntries(engine, clock=clock),
        budgets=budgets,
        incidents=incidents,
        recorders=recorders,
        snapshots=Snapshots(engine, poller, history, settings.recorder_dir, clock=wall_clock),
        report=lambda: replace(poller.current(), policy=governor.status()),
        alive=loops.alive,
        stopping=stopping.is_set,
        server_info=partial(engine.get, "/server_info"),
        control=access,
    )
    control, paths = _control_plane(services, lifespan, exporter.internal_errors.counter("http"))
    front = Front(
        paths,
        AllowList(settings.proxy.extra_paths, settings.engine_root_path),
        has_control_port=settings.control_port is not None,
    )
    if settings.has_data_plane:
        poller.listeners.append(RootPathWatch(front, lambda: poller.capabilities.root_path, history).notice)

    def begin_stop() -> None:
        stopping.set()
        history.close()

    return Sidecar(
        _ports(settings, proxy, front, paths),
        services,
        paths.exact,
        begin_stop,
        # A HEAD is judged as the GET that it becomes.
        HeadAsGet(ControlGuard(BodyLimit(control, CONTROL_BODY_BYTES), access, control.openapi())),
        tls,
        proxy.access_log,
    )


def _record_startup(history: History, *notices: tuple[EventKind, str | None]) -> None:
    """Record what was found at the start, and log it."""
    for kind, notice in notices:
        if notice is not None:
            history.record(kind, notice)
            log.warning("%s", notice)


def _ports(settings: Settings, proxy: Proxy, front: Front, paths: SidecarPaths) -> tuple[ListeningPort, ...]:
    """The ports to listen on, the one with the control plane last."""
    if settings.has_data_plane and settings.control_port is None:
        return (ListeningPort("port", settings.port, "data plane and control plane", protocol(proxy, front)),)
    if settings.has_data_plane:
        elsewhere = f"which is the control port: what the engine serves is on port {settings.port} (port)"
    else:
        why = _why_no_data_plane(settings)
        elsewhere = f"and no request is passed on ({why}): send it to the engine itself"
        log.info("no requests are passed on to the engine: %s", why)
    control = ListeningPort(
        "port" if settings.control_port is None else "control_port",
        settings.control_plane_port,
        "the control plane",
        protocol(proxy, ControlFront(paths, elsewhere), proxy.control_clients),
    )
    if not settings.has_data_plane:
        return (control,)
    return (ListeningPort("port", settings.port, "the data plane", protocol(proxy, front)), control)


def _why_no_data_plane(settings: Settings) -> str:
    if settings.proxy.enabled is False:
        return "proxy.enabled is false"
    return (
        "recorder_dir is set, and neither engine_url nor another setting that concerns requests; with "
        "proxy.enabled=true they are passed on"
    )


def _limits(settings: Settings) -> ProxyLimits:
    given = settings.proxy
    has_control_port = settings.control_port is not None
    shared = {field.name for field in fields(ProxyLimits)} & type(given).model_fields.keys()
    return ProxyLimits(
        **given.model_dump(include=shared - {"max_connections"}),
        max_connections=given.max_connections or default_connections(has_control_port=has_control_port),
        max_control_connections=control_connections(),
    )


def _access(settings: Settings, exporter: Exporter) -> tuple[AdminToken, Access]:
    if settings.admin_token is not None:
        token = AdminToken(settings.admin_token.get_secret_value(), None)
    elif settings.admin_token_file is not None:
        token = AdminToken(None, settings.admin_token_file)
    else:
        token = AdminToken(None, default_token_file(settings.control_plane_port, os.environ), is_temporary=True)
    if settings.trust_loopback:
        log.info("control calls from this machine's own addresses need no token (trust_loopback)")
    access = Access(
        token,
        port=settings.control_plane_port,
        trust_loopback=settings.trust_loopback,
        denied=exporter.control_denied,
    )
    return token, access


def _incidents(
    settings: Settings,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    internal_error: Callable[[], None],
) -> Incidents:
    kept = settings.incidents
    incidents = Incidents(
        IncidentStore(kept.folder, keep=kept.keep, max_bytes=kept.max_bytes),
        engine_log=settings.engine_log,
        clock=wall_clock,
        monotonic=clock,
        internal_error=internal_error,
    )
    if incidents.problem is not None:
        log.warning("%s", incidents.problem)
    return incidents


def _recorders(
    settings: Settings,
    engine: Engine,
    proxied: Callable[[], int],
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Recorders | None:
    if settings.recorder_dir is None:
        return None
    return Recorders(
        engine,
        settings.recorder_dir,
        rate=settings.recorder_rate,
        seconds=settings.recorder_seconds,
        max_step_seconds=settings.max_step_seconds,
        proxied=proxied,
        clock=wall_clock,
        monotonic=clock,
    )


def _control_plane(
    services: Services, lifespan: Callable[[FastAPI], object], internal_error: Callable[[], None]
) -> tuple[FastAPI, SidecarPaths]:
    """The FastAPI application and the paths that it answers."""
    app = FastAPI(
        title="Highwater",
        version=__version__,
        summary="Where a vLLM server's memory went, and how to get it back without failing a request.",
        openapi_url="/memory/openapi.json",  # /openapi.json and /docs are the engine's, proxied
        docs_url=None,
        redoc_url=None,
        responses=PROBLEM_RESPONSES,
        lifespan=lifespan,  # type: ignore[arg-type]
    )
    for router in (
        memory_router,
        budget_router,
        plan_router,
        control_router,
        snapshots_router,
        policy_router,
        health_router,
    ):
        app.include_router(router(services))
    app.include_router(incidents_router(services.incidents))
    app.include_router(dashboard_router())
    app.include_router(runbooks_router())
    answer_problems(app, internal_error)
    exact = frozenset(app.openapi()["paths"]) | {"/memory/openapi.json", "/dashboard"}
    return app, SidecarPaths(exact, _SIDECAR_PREFIXES, _LIVE_PATHS)
