"""The parts between clients and the engine: the gate, the proxy, and a front for each port."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, fields

from gated_proxy.allowlist import NO_ROOT_PATH, AllowList
from gated_proxy.client import protocol
from gated_proxy.door import Door
from gated_proxy.gate import Gate
from gated_proxy.logs import AccessLog
from gated_proxy.proxy import Proxy, ProxyLimits
from gated_proxy.routes import ControlFront, Front, SidecarPaths
from gated_proxy.traffic import ProxyTraffic
from highwater.model.engine import STATES
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.process.logs import InternalErrors
from highwater.process.resources import control_connections, default_connections
from highwater.server.settings import Settings
from highwater.server.sidecar import ListeningPort, why_no_data_plane
from highwater.watch.history import History

log = logging.getLogger("highwater")


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
