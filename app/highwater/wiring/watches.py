"""The parts that watch host memory, growth, and an engine that dies, hangs or has no memory left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from gated_proxy.door import RequestItems
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.oom_kills import OomKillWatch
from highwater.diagnose.incidents.store import IncidentStore
from highwater.diagnose.incidents.watcher import IncidentWatcher
from highwater.diagnose.rules.book import host_findings
from highwater.growth.host_series import host_series
from highwater.growth.series import Measured
from highwater.growth.store import FloorFile
from highwater.growth.watch import GrowthWatch
from highwater.host.needs import CacheCounts
from highwater.host.process_lives import ProcessLives
from highwater.host.reader import HostReader
from highwater.host.watch import HostWatch
from highwater.memory.poller import Poller
from highwater.process.internal_errors import InternalErrors
from highwater.readings.growth import SeriesGrowth
from highwater.settings.settings import Settings
from highwater.wiring.core import Clocks, Core

_UNSEEN_STARTS = (
    " Whether a start of it ended cannot be seen: recorder_dir (HIGHWATER_RECORDER_DIR for vLLM) or engine_log would "
    "show that"
)

log = logging.getLogger("highwater")


def wire_host(settings: Settings, poller: Poller, clocks: Clocks, internal_errors: InternalErrors) -> HostWatch:
    reader = HostReader(
        settings.recorder_dir, workers=lambda: poller.current().ranks, clock=clocks.wall, monotonic=clocks.monotonic
    )
    watch = HostWatch(
        reader,
        judge=host_findings,
        counts=lambda: _cache_counts(poller),
        life=lambda: poller.life.id if poller.current().engine.traits.is_up else None,
        monotonic=clocks.monotonic,
        internal_error=internal_errors.counter("host"),
    )
    lives = ProcessLives(reader.exists)
    poller.engine_process = watch.engine_process
    watch.listeners.append(lives.look)
    poller.engine_lives = lambda: lives.last
    poller.stopped_engine = watch.stopped_engine
    poller.silent_core = watch.silent_core
    if settings.recorder_dir is None and settings.engine_log is None:
        poller.unseen_starts = _UNSEEN_STARTS
    return watch


def _cache_counts(poller: Poller) -> CacheCounts:
    report, load = poller.current(), poller.last_load
    spilled = [rank.encoder_cache.host_bytes for rank in report.ranks if rank.encoder_cache is not None]
    pinned = [rank.host_memory.pinned_bytes for rank in report.ranks if rank.host_memory.pinned_bytes is not None]
    return CacheCounts(
        queries=load.mm_cache_queries,
        hits=load.mm_cache_hits,
        spilled_bytes=sum(spilled) if spilled else None,
        pinned_bytes=sum(pinned) if pinned else None,
    )


def wire_growth(
    settings: Settings, core: Core, host: HostWatch, clocks: Clocks, internal_errors: InternalErrors
) -> GrowthWatch:
    """Return the watch of growth. Its floors are kept beside the state file."""

    async def read_host(idle_seconds: float) -> list[Measured]:
        now = await host.read()
        return list(host_series(now.reading, idle_seconds=idle_seconds, ranks=core.poller.current().ranks))

    state = settings.state_file
    watch = GrowthWatch(
        core.history,
        FloorFile(None if state is None else state.with_name(f"{state.name}.growth")),
        host_series=read_host,
        clock=clocks.monotonic,
        wall_clock=clocks.wall,
        internal_error=internal_errors.counter("growth"),
    )
    core.poller.listeners.append(watch.notice)
    return watch


def wire_incidents(
    settings: Settings,
    core: Core,
    clocks: Clocks,
    internal_errors: InternalErrors,
    *,
    host: HostWatch,
    verdicts: Callable[[], tuple[SeriesGrowth, ...]],
    requests: Callable[[], Iterator[RequestItems]],
) -> tuple[Incidents, IncidentWatcher, OomKillWatch]:
    store = settings.incidents
    incidents = Incidents(
        IncidentStore(store.folder, keep=store.keep, max_bytes=store.max_bytes),
        engine_log=settings.engine_log,
        clock=clocks.wall,
        monotonic=clocks.monotonic,
        internal_error=internal_errors.counter("diagnosis"),
    )
    if incidents.problem is not None:
        log.warning("%s", incidents.problem)
    oom_kills = OomKillWatch(clocks.monotonic)
    host.listeners.append(oom_kills.look)
    watcher = IncidentWatcher(
        incidents,
        core.history,
        recorders=core.recorders,
        life=lambda: core.poller.life,
        policy=core.governor.status,
        verdicts=verdicts,
        stopped_processes=host.stopped_processes,
        oom_kills=oom_kills,
        requests=requests,
        read_host=host.facts,
        is_start_under_way=lambda: core.poller.is_start_under_way,
        log_says_start_failed=core.poller.log_says_start_failed,
        ended_in_order=core.poller.note_stop,
        internal_error=internal_errors.counter("incidents"),
    )
    core.poller.listeners.append(watcher.notice)
    return incidents, watcher, oom_kills
