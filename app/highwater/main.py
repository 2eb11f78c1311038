"""Wires the sidecar: settings in, an ASGI application out. The lifespan owns every task.

::

    request ──► Front decides ──┬── sidecar path ──► FastAPI (api/) ──► poller, governor, history, exporter
                                ├── admitted by the allow list ──► Proxy ──► engine
                                └── anything else ──► 404 or 403, naming the setting that would allow it

With ``control_port`` the first way is on that port alone, and the second on ``port``; without a data plane there is no
second. Both ports share one ``Proxy``, with a limit of clients each.

``wiring`` builds each area from those before it::

    counters ──► access ──► data plane ──► core ──► host ──► growth ──► incidents
                                    ports ◄── control plane ◄── exporter ◄───┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import httpx
from fastapi import FastAPI

from highwater.api.engine_page import EnginePage
from highwater.api.metrics import Counters, Exporter
from highwater.api.services import Services
from highwater.api.starts import StartReports
from highwater.files.tls import TlsWatch, engine_context, listening_context
from highwater.memory.encoder_cache import EncoderCacheEntries
from highwater.memory.snapshots import Snapshots
from highwater.readings.report import ProxyLoad, Report
from highwater.settings.settings import Settings
from highwater.wiring.control_plane import wire_access, wire_control_plane
from highwater.wiring.core import Clocks, Core, wire_engine, wire_recorders
from highwater.wiring.data_plane import RootPathWatch, listening_ports, make_front, wire_data_plane
from highwater.wiring.door import wire_door
from highwater.wiring.sidecar import Loops, Sidecar
from highwater.wiring.start_line import WaitingLog
from highwater.wiring.watches import wire_growth, wire_host, wire_incidents


def create_app(
    settings: Settings,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Sidecar:
    """Wire a sidecar. Tests replace the clocks (``Clocks``) and the network towards the engine on the control plane."""
    return _Parts(settings, Clocks(clock, wall_clock), transport).sidecar()


class _Parts:
    def __init__(self, settings: Settings, clocks: Clocks, transport: httpx.AsyncBaseTransport | None) -> None:
        self.settings, self.clocks, self.counters = settings, clocks, Counters()
        errors = self.counters.internal_errors
        self.tls = listening_context(settings.tls.files)
        engine_tls = engine_context(settings.engine_url, settings.engine_tls.files)
        self.token, self.access = wire_access(settings, self.counters.control_denied)
        self.data = wire_data_plane(
            settings,
            clocks=clocks,
            tls=engine_tls,
            observer=self.counters.traffic,
            withhold=self.access.without_token,
            internal_errors=errors,
        )
        engine = wire_engine(settings, clocks, engine_tls, transport)
        self.core = core = Core(
            settings,
            clocks,
            engine,
            wire_recorders(settings, engine, clocks),
            self.data.gate,
            observer=self.counters,
            internal_errors=errors,
            requests_under_way=self.data.requests_under_way,
            proxied=lambda: self.counters.traffic.requests_ended if settings.has_data_plane else None,
            host_kept_bytes=lambda: self.host.kept_bytes(),  # noqa: PLW0108 - it is made later, of the poller
        )
        self.host = wire_host(settings, core.poller, clocks, errors)
        self.door = wire_door(settings, self.data.door, core, self.host, clocks)
        self.growth = wire_growth(settings, core, self.host, clocks, errors)
        self.incidents, self.watcher, self.oom_kills = wire_incidents(
            settings,
            core,
            clocks,
            errors,
            host=self.host,
            verdicts=self.growth.verdicts,
            requests=self.data.door.requests,
        )
        watches = [self.watcher.run, self.host.run, self.growth.run, TlsWatch(self.tls, engine_tls).run]
        if core.shared.has_witness:
            watches.append(core.shared.run)
        self.loops = Loops(core.poller.run, core.governor.run, *watches)
        self.stopping = asyncio.Event()

    def sidecar(self) -> Sidecar:
        settings, core, proxy = self.settings, self.core, self.data.proxy
        services = self._services()
        control, paths = wire_control_plane(services, self._lifespan, self.counters.internal_errors.counter("http"))
        front = make_front(settings, paths)
        core.poller.listeners.append(WaitingLog(self.clocks.monotonic).notice)
        if settings.has_data_plane:
            watch = RootPathWatch(front, lambda: core.poller.capabilities.root_path, core.history)
            core.poller.listeners.append(watch.notice)

        def begin_stop() -> None:
            self.stopping.set()
            core.history.close()

        return Sidecar(
            ports=listening_ports(settings, proxy, front, paths),
            services=services,
            sidecar_paths=paths.exact,
            begin_stop=begin_stop,
            control=control,
            tls=self.tls,
            access_log=proxy.access_log,
        )

    def _services(self) -> Services:
        core, data, clocks = self.core, self.data, self.clocks
        poller, governor = core.poller, core.governor
        exporter = Exporter(
            self.counters,
            poller.current,
            governor.status,
            held=lambda: data.gate.held,
            door=None if self.door is None else data.door,
            connections=data.proxy.connections,
            dropped_lines=data.dropped_lines,
            incidents=lambda: self.incidents.counts,
            growth=self.growth.verdicts,
            host=lambda: self.host.now,
            oom_kills=lambda: self.oom_kills.total,
        )
        return Services(
            poller=poller,
            governor=governor,
            relief=core.relief,
            policy=core.policy,
            history=core.history,
            exporter=exporter,
            engine_page=EnginePage(core.engine),
            entries=EncoderCacheEntries(core.engine, clock=clocks.monotonic),
            starts=StartReports(core.budgets),
            growth=self.growth,
            incidents=self.incidents,
            recorders=core.recorders,
            snapshots=Snapshots(core.engine, poller, core.history, self.settings.recorder_dir, clock=clocks.wall),
            report=self._report,
            requests=data.door.requests,
            host=self.host,
            alive=self.loops.alive,
            stopping=self.stopping.is_set,
            server_info=partial(core.engine.get, "/server_info"),
            control=self.access,
        )

    def _report(self) -> Report:
        now = self.core.poller.current()
        growth = replace(now.growth, series=self.growth.verdicts())
        host = None if self.host.now is None else self.host.now.summary
        proxied, under_way = self.core.history.proxied(), self.counters.traffic.under_way
        proxy = None if proxied is None else ProxyLoad(requests_ended=proxied, requests_under_way=under_way)
        return replace(
            now,
            sidecar_started_at=self.core.history.began_at,
            policy=self.core.governor.status(),
            host=host,
            growth=growth,
            proxy=proxy,
            door=None if self.door is None else self.door.state(),
        )

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        core, proxy = self.core, self.data.proxy
        self.token.start()
        await proxy.start()
        self.loops.start()
        try:
            yield
        finally:
            core.history.close()
            await self.watcher.finish()
            await self.loops.stop()
            self.incidents.close()
            if core.recorders is not None:
                core.recorders.close()
            await proxy.aclose()
            await core.engine.aclose()
            self.token.close()
