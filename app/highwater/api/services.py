"""The parts that ``main`` has wired, as the routers get them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from highwater.api.access import Access
from highwater.api.engine_page import EnginePage
from highwater.api.metrics import Exporter
from highwater.diagnose.incidents.incidents import Incidents
from highwater.engine.client import EngineResponse
from highwater.growth.watch import GrowthWatch
from highwater.host.watch import HostWatch
from highwater.memory.encoder_cache import EncoderCacheEntries
from highwater.memory.history import History
from highwater.memory.poller import Poller
from highwater.memory.snapshots import Snapshots
from highwater.memory.sources import EngineBudgets
from highwater.policy.governor import Governor
from highwater.policy.store import PolicyStore
from highwater.readings.report import Report
from highwater.recorder.recorders import Recorders
from highwater.relief.relief import Relief


@dataclass(frozen=True, slots=True)
class Services:
    """The wired parts; ``report`` returns the last one with its age, the policy's state and the verdicts on growth."""

    poller: Poller
    governor: Governor
    relief: Relief
    policy: PolicyStore
    history: History
    exporter: Exporter
    engine_page: EnginePage
    entries: EncoderCacheEntries
    budgets: EngineBudgets
    growth: GrowthWatch
    incidents: Incidents
    recorders: Recorders | None
    snapshots: Snapshots
    host: HostWatch
    report: Callable[[], Report]
    alive: Callable[[], bool]
    stopping: Callable[[], bool]
    server_info: Callable[[str], Awaitable[EngineResponse]]
    control: Access
