"""The one place that wires: settings in, an ASGI application out. The lifespan owns every task.

::

    request ──► Front decides ──┬── sidecar path ──► FastAPI (api/) ──► poller, governor, history, exporter
                                ├── admitted by the allow list ──► Proxy ──► engine
                                └── anything else ──► 404 or 403, naming the setting that would allow it

With ``control_port`` the first way is on that port alone, and the second one on ``port``; without a data plane there is
no second one. Both ports share one ``Proxy``, with a limit of clients each.

Each area is made by a builder of ``wiring``, from those that were made before it::

    counters ──► access ──► data plane ──► core ──► growth ──► incidents ──► exporter ──► control plane ──► ports
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import httpx
from fastapi import FastAPI

from highwater.api.access import Access
from highwater.api.counters import Counters
from highwater.api.engine_page import EnginePage
from highwater.api.host_families import HostNow
from highwater.api.metrics import Exporter
from highwater.api.services import Services
from highwater.files.admin_token import AdminToken
from highwater.files.tls import TlsWatch, engine_context, listening_context
from highwater.growth.watch import GrowthWatch
from highwater.host.watch import HostWatch
from highwater.incidents import Incidents
from highwater.incidents.watcher import IncidentWatcher
from highwater.memory.encoder_cache import EncoderCacheEntries
from highwater.memory.snapshots import Snapshots
from highwater.readings import Report
from highwater.settings import Settings
from highwater.wiring.clocks import Clocks
from highwater.wiring.control_plane import wire_access, wire_control_plane
from highwater.wiring.core import Core, CoreInputs, wire_core, wire_engine, wire_recorders
from highwater.wiring.data_plane import DataPlane, RootPathWatch, listening_ports, make_front, wire_data_plane
from highwater.wiring.growth import wire_growth
from highwater.wiring.host import wire_host
from highwater.wiring.incidents import wire_incidents
from highwater.wiring.loops import Loops
from highwater.wiring.sidecar import Sidecar
from highwater.wiring.start_line import WaitingLog


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
        clock: Monotonic seconds: ``Clocks.monotonic``.
        wall_clock: Unix seconds: ``Clocks.wall``.
        transport: Replaces the network towards the engine on the control plane, in tests.
    """
    clocks, counters = Clocks(clock, wall_clock), Counters()
    errors = counters.internal_errors
    tls = listening_context(settings.tls.files)
    engine_tls = engine_context(settings.engine_url, settings.engine_tls.files)
    token, access = wire_access(settings, counters.control_denied)
    data = wire_data_plane(
        settings,
        clocks=clocks,
        tls=engine_tls,
        observer=counters.traffic,
        withhold=access.without_token,
        internal_errors=errors,
    )
    engine = wire_engine(settings, clocks, engine_tls, transport)
    core = wire_core(
        CoreInputs(
            settings=settings,
            engine=engine,
            recorders=wire_recorders(settings, engine, clocks),
            gate=data.gate,
            clocks=clocks,
            observer=counters,
            internal_errors=errors,
            requests_under_way=data.requests_under_way,
        )
    )
    host = wire_host(settings, core.poller, clocks, errors)
    growth = wire_growth(settings, core, host, clocks, errors)
    incidents, watcher = wire_incidents(settings, core, clocks, errors, growth.verdicts)
    shared = [core.shared.run] if core.shared.has_witness else []
    tls_watch = TlsWatch(tls, engine_tls)
    loops = Loops(core.poller.run, core.governor.run, watcher.run, host.run, growth.run, tls_watch.run, *shared)
    areas = _Areas(settings, clocks, counters, token, access, data, core, growth, incidents, watcher, host, loops)
    return _serve(areas, tls)


@dataclass(frozen=True, slots=True)
class _Areas:
    """The parts that the control plane serves, and that the lifespan starts and stops."""

    settings: Settings
    clocks: Clocks
    counters: Counters
    token: AdminToken
    access: Access
    data: DataPlane
    core: Core
    growth: GrowthWatch
    incidents: Incidents
    watcher: IncidentWatcher
    host: HostWatch
    loops: Loops


def _serve(areas: _Areas, tls: ssl.SSLContext | None) -> Sidecar:
    """Put the control plane before the parts, and the ports before both planes."""
    settings, core, proxy = areas.settings, areas.core, areas.data.proxy
    stopping = asyncio.Event()
    services = _services(areas, stopping.is_set)
    internal_error = areas.counters.internal_errors.counter("http")
    control, paths = wire_control_plane(services, _lifespan(areas), internal_error)
    front = make_front(settings, paths)
    core.poller.listeners.append(WaitingLog(areas.clocks.monotonic).notice)
    if settings.has_data_plane:
        watch = RootPathWatch(front, lambda: core.poller.capabilities.root_path, core.history)
        core.poller.listeners.append(watch.notice)

    def begin_stop() -> None:
        stopping.set()
        core.history.close()

    return Sidecar(
        ports=listening_ports(settings, proxy, front, paths),
        services=services,
        sidecar_paths=paths.exact,
        begin_stop=begin_stop,
        control=control,
        tls=tls,
        access_log=proxy.access_log,
    )


def _services(areas: _Areas, stopping: Callable[[], bool]) -> Services:
    """The parts as the routers get them."""
    core, data, clocks = areas.core, areas.data, areas.clocks
    poller, governor = core.poller, core.governor
    exporter = Exporter(
        areas.counters,
        poller.current,
        governor.status,
        held=lambda: data.gate.held,
        connections=data.proxy.connections,
        dropped_lines=data.dropped_lines,
        incidents=lambda: areas.incidents.counts,
        growth=areas.growth.verdicts,
        host=lambda: _host_now(areas.host),
    )

    def report() -> Report:
        now = poller.current()
        grown = replace(now.growth, series=areas.growth.verdicts())
        return replace(now, policy=governor.status(), host=areas.host.summary, growth=grown)

    return Services(
        poller=poller,
        governor=governor,
        relief=core.relief,
        policy=core.policy,
        history=core.history,
        exporter=exporter,
        engine_page=EnginePage(core.engine),
        entries=EncoderCacheEntries(core.engine, clock=clocks.monotonic),
        budgets=core.budgets,
        growth=areas.growth,
        incidents=areas.incidents,
        recorders=core.recorders,
        snapshots=Snapshots(core.engine, poller, core.history, areas.settings.recorder_dir, clock=clocks.wall),
        report=report,
        host=areas.host,
        alive=areas.loops.alive,
        stopping=stopping,
        server_info=partial(core.engine.get, "/server_info"),
        control=areas.access,
    )


def _host_now(host: HostWatch) -> HostNow | None:
    return None if host.last is None else HostNow(host.last, host.outlook)


def _lifespan(areas: _Areas) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    core, proxy = areas.core, areas.data.proxy

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        areas.token.start()
        await proxy.start()
        areas.loops.start()
        try:
            yield
        finally:
            core.history.close()
            await areas.watcher.finish()
            await areas.loops.stop()
            areas.incidents.close()
            if core.recorders is not None:
                core.recorders.close()
            await proxy.aclose()
            await core.engine.aclose()
            areas.token.close()

    return lifespan
