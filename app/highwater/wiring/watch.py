"""The parts that watch: the engine and its recorders, host memory, the poll, growth, and incidents."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx

from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.oom_kills import OomKillWatch
from highwater.diagnose.incidents.store import IncidentStore
from highwater.diagnose.incidents.watcher import IncidentWatcher
from highwater.engine.capabilities import Detection
from highwater.engine.client import Engine
from highwater.engine.life import Lives, local_start
from highwater.files.state_file import StateFile
from highwater.growth.book import FloorFile
from highwater.growth.series import Measured, host_series
from highwater.growth.watch import GrowthWatch
from highwater.host.process_lives import ProcessLives
from highwater.host.processor_cache import CacheCounts
from highwater.host.reader import HostReader
from highwater.host.watch import HostWatch
from highwater.memory.history import History
from highwater.memory.poller import Poller
from highwater.memory.reports import Reports
from highwater.memory.rounds import PollObserver, PollTimes, Rounds
from highwater.memory.shared_devices import SharedDevices, find_nvml
from highwater.memory.sources import EngineBudgets, Source, all_sources
from highwater.memory.starts import NOTHING_SEEN, EngineProcesses
from highwater.plan.encoder_view import launch_of
from highwater.process.clocks import Clocks
from highwater.process.internal_errors import InternalErrors
from highwater.readings.policy import PolicyStatus
from highwater.readings.rank import RankReading
from highwater.recorder.recorders import Recorders
from highwater.settings.settings import Settings

MAX_HISTORY_SAMPLES = 86_400  # a day at one a second: 120 MB with eight ranks
_UNSEEN_STARTS = (
    " Whether a start of it ended cannot be seen: recorder_dir (HIGHWATER_RECORDER_DIR for vLLM) or engine_log would "
    "show that"
)

log = logging.getLogger("highwater")


def wire_engine(
    settings: Settings, clocks: Clocks, tls: ssl.SSLContext | None, transport: httpx.AsyncBaseTransport | None
) -> Engine:
    return Engine(
        settings.engine_url,
        rpc_deadline_seconds=settings.rpc_deadline_seconds,
        ssl_context=tls,
        transport=transport,
        clocks=clocks,
    )


def wire_recorders(settings: Settings, engine: Engine, clocks: Clocks) -> Recorders | None:
    if settings.recorder_dir is None:
        return None
    return Recorders(
        engine,
        settings.recorder_dir,
        rate=settings.recorder_rate,
        seconds=settings.recorder_seconds,
        clocks=clocks,
    )


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one engine from poll to poll: its last report, and its lives."""

    engine: Engine
    recorders: Recorders | None
    budgets: EngineBudgets
    state: StateFile
    lives: Lives
    reports: Reports


def wire_known(
    settings: Settings, clocks: Clocks, engine: Engine, recorders: Recorders | None, internal_errors: InternalErrors
) -> Known:
    state = StateFile(settings.state_file)
    counter = internal_errors.counter("poller")
    return Known(
        engine=engine,
        recorders=recorders,
        budgets=EngineBudgets(engine, recorders),
        state=state,
        lives=Lives(state, started_at=local_start()),
        reports=Reports(engine.url, clocks, settings.stale_seconds, internal_error=counter),
    )


def wire_history(
    settings: Settings,
    clocks: Clocks,
    *,
    proxied: Callable[[], int | None] = lambda: None,
    host_kept_bytes: Callable[[], int | None] = lambda: None,
) -> History:
    samples = min(int(settings.history_seconds / settings.poll_seconds) + 1, MAX_HISTORY_SAMPLES)
    return History(samples, clocks=clocks, proxied=proxied, host_kept_bytes=host_kept_bytes)


@dataclass(frozen=True, slots=True)
class Host:
    watch: HostWatch
    oom_kills: OomKillWatch
    processes: EngineProcesses


def wire_host(settings: Settings, known: Known, clocks: Clocks, internal_errors: InternalErrors) -> Host:
    reports = known.reports
    reader = HostReader(
        settings.recorder_dir, workers=lambda: reports.current().ranks, clock=clocks.wall, monotonic=clocks.monotonic
    )
    lives, oom_kills = ProcessLives(reader.exists), OomKillWatch(clocks.monotonic)
    watch = HostWatch(
        reader,
        counts=lambda: _cache_counts(reports),
        life=lambda: known.lives.present.id if reports.current().engine.traits.is_up else None,
        listeners=(lives.look, oom_kills.look),
        monotonic=clocks.monotonic,
        internal_error=internal_errors.counter("host"),
    )
    are_starts_unseen = settings.recorder_dir is None and settings.engine_log is None
    processes = EngineProcesses(
        one=watch.engine_process,
        lives=lambda: lives.last,
        stopped=watch.stopped_engine,
        silent_core=watch.silent_core,
        unseen_starts=_UNSEEN_STARTS if are_starts_unseen else "",
    )
    return Host(watch, oom_kills, processes)


def _cache_counts(reports: Reports) -> CacheCounts:
    ranks, load = reports.current().ranks, reports.load
    spilled = [rank.encoder_cache.host_bytes for rank in ranks if rank.encoder_cache is not None]
    pinned = [rank.host_memory.pinned_bytes for rank in ranks if rank.host_memory.pinned_bytes is not None]
    return CacheCounts(
        queries=load.mm_cache_queries,
        hits=load.mm_cache_hits,
        spilled_bytes=sum(spilled) if spilled else None,
        pinned_bytes=sum(pinned) if pinned else None,
    )


def wire_shared_devices(known: Known, history: History, internal_errors: InternalErrors) -> SharedDevices:
    return SharedDevices(
        known.reports.current,
        history,
        recorders=None if known.recorders is None else known.recorders.files,
        nvml=find_nvml(),
        internal_error=internal_errors.counter("shared_devices"),
    )


def wire_poller(
    settings: Settings,
    known: Known,
    clocks: Clocks,
    history: History,
    shared: SharedDevices,
    *,
    observer: PollObserver,
    internal_errors: InternalErrors,
    processes: EngineProcesses = NOTHING_SEEN,
    requests_under_way: Callable[[], int] = lambda: 0,
    sources: Callable[[Engine, EngineBudgets], Sequence[Source]] = all_sources,
) -> Poller:
    """Return the poller; ``sources`` makes the sources of readings."""
    rounds = Rounds(
        known.engine,
        Detection(known.engine, assume_extension=settings.engine_has_extension, clocks=clocks),
        sources(known.engine, known.budgets),
        known.recorders,
        PollTimes(
            poll_seconds=settings.poll_seconds,
            idle_poll_seconds=settings.idle_poll_seconds,
            max_step_seconds=settings.max_step_seconds,
        ),
        requests_under_way=requests_under_way,
        observer=observer,
        clocks=clocks,
    )

    def launched(reading: RankReading, version: str | None) -> RankReading:
        launch = launch_of(known.budgets.budget_of(reading), reading, version)
        return replace(reading, launch=launch, shared_with=shared.users.get(reading.device_id or ""))

    return Poller(
        rounds,
        history,
        known.lives,
        known.reports,
        processes=processes,
        launched=launched,
        internal_error=internal_errors.counter("poller"),
    )


def wire_growth(
    settings: Settings,
    reports: Reports,
    history: History,
    host: HostWatch,
    *,
    clocks: Clocks,
    internal_errors: InternalErrors,
) -> GrowthWatch:
    """Return the watch of growth. Its floors are kept beside the state file."""

    async def read_host(idle_seconds: float) -> list[Measured]:
        now = await host.read()
        return list(host_series(now.reading, idle_seconds=idle_seconds, ranks=reports.current().ranks))

    state = settings.state_file
    watch = GrowthWatch(
        history,
        FloorFile(None if state is None else state.with_name(f"{state.name}.growth")),
        host_series=read_host,
        clocks=clocks,
        internal_error=internal_errors.counter("growth"),
    )
    reports.subscribe(watch.notice)
    return watch


def wire_incidents(
    settings: Settings,
    poller: Poller,
    history: History,
    *,
    recorders: Recorders | None,
    host: Host,
    growth: GrowthWatch,
    policy: Callable[[], PolicyStatus],
    clocks: Clocks,
    internal_errors: InternalErrors,
) -> tuple[Incidents, IncidentWatcher]:
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
    watcher = IncidentWatcher(
        incidents,
        history,
        recorders=recorders,
        life=lambda: poller.life,
        policy=policy,
        verdicts=growth.verdicts,
        stopped_processes=host.watch.stopped_processes,
        oom_kills=host.oom_kills,
        read_host=host.watch.facts,
        is_start_under_way=lambda: poller.starts.is_under_way,
        log_says_start_failed=poller.starts.log_says_failed,
        ended_in_order=poller.note_stop,
        internal_error=internal_errors.counter("incidents"),
    )
    poller.reports.subscribe(watcher.notice)
    return incidents, watcher
