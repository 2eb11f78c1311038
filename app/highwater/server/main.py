"""Wires the sidecar: settings in, an ASGI application out. The lifespan owns every task.

::

    request ──► Front decides ──┬── sidecar path ──► FastAPI (http/) ──► poller, governor, history, exporter
                                ├── admitted by the allow list ──► Proxy ──► engine
                                └── anything else ──► 404 or 403, naming the setting that would allow it

With ``control_port`` the first way is on that port alone, and the second on ``port``; without a data plane there is no
second. Both ports share one ``Proxy``, with a limit of clients each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp

from gated_proxy.routes import SidecarPaths
from highwater import __version__
from highwater.http import control, health, history, memory, pages
from highwater.http.access import ControlGuard, HeadAsGet
from highwater.http.metrics import EnginePage, Exporter
from highwater.http.problems import NO_UNKNOWN_QUERY, PROBLEM_RESPONSES, SIDECAR_PATHS_HINT, answer_problems
from highwater.http.services import Services, StartReports
from highwater.model.report import ProxyLoad, Report
from highwater.model.units import MIB
from highwater.process.clocks import SYSTEM, Clocks
from highwater.process.tls import TlsWatch, listening_context
from highwater.server.parts import Parts
from highwater.server.settings import Settings
from highwater.server.settings.sections import IncidentSettings
from highwater.server.sidecar import Loops, RootPathWatch, Sidecar, WaitingLog, listening_ports, make_front
from highwater.watch.snapshots import Snapshots
from highwater.watch.sources import EncoderCacheEntries

# An engine's first answer may tell that it was restarted, and what a recorder writes next shows that it runs.
FIRST_READINGS: Final = 3
FIRST_PAUSE_SECONDS: Final = 0.3
CONTROL_BODY_BYTES = MIB
_LIVE_PATHS = frozenset({"/memory/events"})
_SIDECAR_FOLDERS = ("/dashboard/", "/docs/", "/memory/", "/policy/")
_SIDECAR_PREFIXES = ("/memory/incidents/", "/memory/snapshots/", "/dashboard/", pages.RUNBOOKS_PREFIX)


def create_app(
    settings: Settings, clocks: Clocks = SYSTEM, *, transport: httpx.AsyncBaseTransport | None = None
) -> Sidecar:
    """Wire a sidecar. Tests replace the clocks and the network towards the engine on the control plane."""
    return _App(settings, clocks, transport).sidecar()


class ReadOnce(NamedTuple):
    """What a sidecar would answer, of the engine at ``url``, without anything that it remembers."""

    url: str
    answers: Mapping[str, Any]

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401 - JSON
        del params
        return self.answers[path]


async def read_once(settings: Settings, paths: Iterable[str]) -> ReadOnce:
    """Return what a sidecar with these settings would answer, once the engine was read; no loop runs, nothing acts.

    What it would keep is in memory only.
    """
    kept = {"state_file": None, "access_log": None, "incidents": IncidentSettings()}
    app = _App(settings.model_copy(update=kept), SYSTEM, None)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app.sidecar().control), base_url="http://highwater")
    try:
        for _ in range(FIRST_READINGS):
            report = await app.poller.poll()
            if report.ranks and not report.stale:
                break
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
        answers = {path: (await client.get(path)).raise_for_status().json() for path in paths}
        return ReadOnce(settings.engine_url, answers)
    finally:
        await client.aclose()
        await app.aclose()


class _App(Parts):
    def __init__(self, settings: Settings, clocks: Clocks, transport: httpx.AsyncBaseTransport | None) -> None:
        super().__init__(settings, clocks, transport=transport)
        self.listening_tls = listening_context(settings.tls.files)
        self.stopping = asyncio.Event()
        listeners = (self.quiescer.notice, self.governor.notice, self.growth.notice, self.watcher.notice)
        at_door = () if self.door is None else (self.door.notice,)
        for listener in (*listeners, *at_door, WaitingLog(clocks).notice):
            self.reports.subscribe(listener)
        self.loops = Loops(
            partial(self.poller.run, self.governor.poll_interval),
            self.governor.run,
            self.watcher.run,
            self.host.run,
            self.growth.run,
            TlsWatch(self.listening_tls, self.tls).run,
            *([self.shared.run] if self.shared.has_witness else []),
        )

    def sidecar(self) -> Sidecar:
        proxy, services = self.data.proxy, self._services()
        application, paths = _control_plane(services, self._lifespan, self.internal_errors.counter("http"))
        front = make_front(self.settings, paths)
        if self.settings.has_data_plane:
            watch = RootPathWatch(front, lambda: self.poller.capabilities.root_path, self.history)
            self.reports.subscribe(watch.notice)
        return Sidecar(
            ports=listening_ports(self.settings, proxy, front, paths),
            services=services,
            sidecar_paths=paths.exact,
            begin_stop=self.begin_stop,
            control=application,
            tls=self.listening_tls,
            access_log=proxy.access_log,
        )

    def begin_stop(self) -> None:
        self.stopping.set()
        self.history.close()

    def _services(self) -> Services:
        exporter = Exporter(
            self.counters,
            self.reports.current,
            self.governor.status,
            whole=self._report,
            held=lambda: self.data.gate.held,
            door=None if self.door is None else self.data.door,
            connections=self.data.proxy.connections,
            dropped_lines=self.data.dropped_lines,
            incidents=lambda: self.incidents.counts,
            growth=self.growth.verdicts,
            host=lambda: self.host.now,
            oom_kills=lambda: self.oom_kills.total,
        )
        folder = self.settings.recorder_dir
        return Services(
            poller=self.poller,
            governor=self.governor,
            relief=self.relief,
            policy=self.policy,
            history=self.history,
            exporter=exporter,
            engine_page=EnginePage(self.engine),
            entries=EncoderCacheEntries(self.engine, clocks=self.clocks),
            starts=StartReports(self.budgets),
            growth=self.growth,
            incidents=self.incidents,
            recorders=self.recorders,
            snapshots=Snapshots(self.engine, self.poller, self.history, folder, clocks=self.clocks),
            report=self._report,
            requests=self.requests_with_images,
            host=self.host,
            alive=self.loops.alive,
            stopping=self.stopping.is_set,
            server_info=partial(self.engine.get, "/server_info"),
            control=self.access,
        )

    def _report(self) -> Report:
        now, host = self.reports.current(), self.host.now
        ended, under_way = self.requests_ended(), self.counters.traffic.under_way
        return replace(
            now,
            now=self.clocks.wall(),
            sidecar_started_at=self.history.began_at,
            policy=self.governor.status(),
            host=None if host is None else host.report.summary,
            growth=replace(now.growth, series=self.growth.verdicts()),
            proxy=None if ended is None else ProxyLoad(requests_ended=ended, requests_under_way=under_way),
            door=None if self.door is None else self.door.state(),
            relief=self.relief.now,
            incident=self.incidents.last_open,
        )

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.token.start()
        await self.data.proxy.start()
        self.loops.start()
        try:
            yield
        finally:
            self.history.close()
            await self.watcher.finish()
            await self.loops.stop()
            await self.aclose()

    async def aclose(self) -> None:
        """Close files and connections, and remove a token that was made for this run; no task uses them any more."""
        self.incidents.close()
        if self.recorders is not None:
            self.recorders.close()
        await self.data.proxy.aclose()
        await self.engine.aclose()
        self.token.close()


# --- the control plane: the check of its callers, and the application that answers them ---


def _control_plane(
    services: Services, lifespan: Callable[[FastAPI], object], internal_error: Callable[[], None]
) -> tuple[ASGIApp, SidecarPaths]:
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
    app.state.services = services
    # Probes and scrapes come first, and most often: FastAPI tries one router after the other.
    app.include_router(health.probes)
    for routes in (health, memory, history, control):
        app.include_router(routes.router, dependencies=[NO_UNKNOWN_QUERY])
    app.include_router(pages.router)
    answer_problems(app, internal_error)
    exact = frozenset(app.openapi()["paths"]) | {"/", "/memory/openapi.json", "/dashboard"}
    paths = SidecarPaths(exact, _SIDECAR_PREFIXES, _LIVE_PATHS, _SIDECAR_FOLDERS, SIDECAR_PATHS_HINT)
    # A HEAD is judged as the GET that it becomes.
    return HeadAsGet(ControlGuard(app, services.control, CONTROL_BODY_BYTES)), paths
