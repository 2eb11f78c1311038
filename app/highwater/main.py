"""Wires the sidecar: settings in, an ASGI application out. The lifespan owns every task.

::

    request ──► Front decides ──┬── sidecar path ──► FastAPI (api/) ──► poller, governor, history, exporter
                                ├── admitted by the allow list ──► Proxy ──► engine
                                └── anything else ──► 404 or 403, naming the setting that would allow it

With ``control_port`` the first way is on that port alone, and the second on ``port``; without a data plane there is no
second. Both ports share one ``Proxy``, with a limit of clients each.

``wiring`` builds each area from those before it::

    counters ──► access ──► data plane ──► engine ──► host ──► poller ──► acting ──► growth ──► incidents
                                                ports ◄── control plane ◄── exporter ◄───────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import httpx
from fastapi import FastAPI

from highwater.api.counters import Counters
from highwater.api.engine_page import EnginePage
from highwater.api.metrics import Exporter
from highwater.api.services import Services
from highwater.files.tls import TlsWatch, engine_context, listening_context
from highwater.memory.encoder_cache import EncoderCacheEntries
from highwater.memory.snapshots import Snapshots
from highwater.process.clocks import SYSTEM, Clocks
from highwater.readings.report import ProxyLoad, Report
from highwater.settings.settings import Settings
from highwater.wiring.act import wire_acting, wire_policy
from highwater.wiring.control_plane import wire_access, wire_control_plane
from highwater.wiring.data_plane import RootPathWatch, listening_ports, make_front, wire_data_plane
from highwater.wiring.sidecar import Loops, Sidecar
from highwater.wiring.start_line import WaitingLog
from highwater.wiring.watch import (
    wire_engine,
    wire_growth,
    wire_history,
    wire_host,
    wire_incidents,
    wire_known,
    wire_poller,
    wire_recorders,
    wire_shared_devices,
)


def create_app(
    settings: Settings, clocks: Clocks = SYSTEM, *, transport: httpx.AsyncBaseTransport | None = None
) -> Sidecar:
    """Wire a sidecar. Tests replace the clocks and the network towards the engine on the control plane."""
    return _Parts(settings, clocks, transport).sidecar()


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
        self.known = known = wire_known(settings, clocks, engine, wire_recorders(settings, engine, clocks), errors)
        self.host = wire_host(settings, known, clocks, errors)
        self.history = history = wire_history(
            settings,
            clocks,
            proxied=lambda: self.counters.traffic.requests_ended if settings.has_data_plane else None,
            host_kept_bytes=self.host.watch.kept_bytes,
        )
        policy = wire_policy(settings, known, history)
        shared = wire_shared_devices(known, history, errors)
        self.poller = poller = wire_poller(
            settings,
            known,
            clocks,
            history,
            shared,
            observer=self.counters,
            internal_errors=errors,
            processes=self.host.processes,
            requests_under_way=self.data.requests_under_way,
        )
        self.acting = wire_acting(
            settings,
            known,
            poller,
            history,
            policy=policy,
            shared=shared,
            gate=self.data.gate,
            clocks=clocks,
            observer=self.counters,
            internal_errors=errors,
        )
        self.growth = wire_growth(
            settings, known.reports, history, self.host.watch, clocks=clocks, internal_errors=errors
        )
        self.incidents, self.watcher = wire_incidents(
            settings,
            poller,
            history,
            recorders=known.recorders,
            host=self.host,
            growth=self.growth,
            policy=self.acting.governor.status,
            clocks=clocks,
            internal_errors=errors,
        )
        loops = [
            self._poll,
            self.acting.governor.run,
            self.watcher.run,
            self.host.watch.run,
            self.growth.run,
            TlsWatch(self.tls, engine_tls).run,
        ]
        self.loops = Loops(*loops, *([shared.run] if shared.has_witness else []))
        self.stopping = asyncio.Event()

    async def _poll(self) -> None:
        await self.poller.run(self.acting.governor.poll_interval)

    def sidecar(self) -> Sidecar:
        settings, history, proxy = self.settings, self.history, self.data.proxy
        services = self._services()
        control, paths = wire_control_plane(services, self._lifespan, self.counters.internal_errors.counter("http"))
        front = make_front(settings, paths)
        self.known.reports.subscribe(WaitingLog(self.clocks).notice)
        if settings.has_data_plane:
            watch = RootPathWatch(front, lambda: self.poller.capabilities.root_path, history)
            self.known.reports.subscribe(watch.notice)

        def begin_stop() -> None:
            self.stopping.set()
            history.close()

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
        known, acting, data = self.known, self.acting, self.data
        exporter = Exporter(
            self.counters,
            known.reports.current,
            acting.governor.status,
            held=lambda: data.gate.held,
            connections=data.proxy.connections,
            dropped_lines=data.dropped_lines,
            incidents=lambda: self.incidents.counts,
            growth=self.growth.verdicts,
            host=lambda: self.host.watch.now,
            oom_kills=lambda: self.host.oom_kills.total,
        )
        return Services(
            poller=self.poller,
            governor=acting.governor,
            relief=acting.relief,
            policy=acting.policy,
            history=self.history,
            exporter=exporter,
            engine_page=EnginePage(known.engine),
            entries=EncoderCacheEntries(known.engine, clocks=self.clocks),
            budgets=known.budgets,
            growth=self.growth,
            incidents=self.incidents,
            recorders=known.recorders,
            snapshots=Snapshots(
                known.engine, self.poller, self.history, self.settings.recorder_dir, clocks=self.clocks
            ),
            report=self._report,
            host=self.host.watch,
            alive=self.loops.alive,
            stopping=self.stopping.is_set,
            server_info=partial(known.engine.get, "/server_info"),
            control=self.access,
        )

    def _report(self) -> Report:
        now, host = self.known.reports.current(), self.host.watch.now
        proxied, under_way = self.history.proxied(), self.counters.traffic.under_way
        return replace(
            now,
            sidecar_started_at=self.history.began_at,
            policy=self.acting.governor.status(),
            host=None if host is None else host.summary,
            growth=replace(now.growth, series=self.growth.verdicts()),
            proxy=None if proxied is None else ProxyLoad(requests_ended=proxied, requests_under_way=under_way),
        )

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        known, proxy = self.known, self.data.proxy
        self.token.start()
        await proxy.start()
        self.loops.start()
        try:
            yield
        finally:
            self.history.close()
            await self.watcher.finish()
            await self.loops.stop()
            self.incidents.close()
            if known.recorders is not None:
                known.recorders.close()
            await proxy.aclose()
            await known.engine.aclose()
            self.token.close()
