"""The parts that keep evidence of an engine that dies, hangs or has no memory left."""

from __future__ import annotations

import logging
from collections.abc import Callable

from highwater.incidents import Incidents, IncidentStore
from highwater.incidents.oom_kills import OomKillWatch
from highwater.incidents.watcher import IncidentWatcher
from highwater.process.internal_errors import InternalErrors
from highwater.readings import SeriesGrowth
from highwater.settings import Settings
from highwater.wiring.clocks import Clocks
from highwater.wiring.core import Core

log = logging.getLogger("highwater")


def wire_incidents(
    settings: Settings,
    core: Core,
    clocks: Clocks,
    internal_errors: InternalErrors,
    verdicts: Callable[[], tuple[SeriesGrowth, ...]],
) -> tuple[Incidents, IncidentWatcher]:
    """Wire the incidents, and the watcher that opens them: it hears of every report."""
    kept = settings.incidents
    incidents = Incidents(
        IncidentStore(kept.folder, keep=kept.keep, max_bytes=kept.max_bytes),
        engine_log=settings.engine_log,
        clock=clocks.wall,
        monotonic=clocks.monotonic,
        internal_error=internal_errors.counter("diagnosis"),
    )
    if incidents.problem is not None:
        log.warning("%s", incidents.problem)
    watcher = IncidentWatcher(
        incidents,
        core.history,
        recorders=core.recorders,
        life=lambda: core.poller.life,
        policy=core.governor.status,
        verdicts=verdicts,
        oom_kills=OomKillWatch(clock=clocks.monotonic),
        internal_error=internal_errors.counter("incidents"),
    )
    core.poller.listeners.append(watcher.notice)
    return incidents, watcher
