"""The parts that watch the engine and act on it, each made when it is first asked for, of those that it needs.

::

    engine ──► recorders ──► reports, lives ──► host ──► history ──► poller ──► relief ──► governor
                                                              growth, incidents ◄──┘

A circle among them would not end. So what two parts want of each other stands in a third: the poller's last report in
``reports``, the engine's lives in ``lives``, what the host shows of the engine's processes in ``processes``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import httpx

from gated_proxy.door_items import RequestItems
from highwater.act.governor import Governor, PolicyStore
from highwater.act.quiescer import Quiescer
from highwater.act.relief import Relief
from highwater.act.remedies import all_remedies
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.store import IncidentStore
from highwater.diagnose.incidents.watcher import IncidentWatcher
from highwater.diagnose.rules.book import host_findings
from highwater.engine.capabilities import Detection
from highwater.engine.client import Engine
from highwater.engine.life import Lives, local_start
from highwater.explain.explanation import launch_of
from highwater.growth.book import FloorFile
from highwater.growth.series import Measured, host_series
from highwater.growth.watch import GrowthWatch
from highwater.host.needs import CacheCounts
from highwater.host.past import OomKillWatch
from highwater.host.process_lives import ProcessLives
from highwater.host.watch import HostReader, HostWatch
from highwater.http.access import Access
from highwater.http.metrics import Counters
from highwater.model.rank import RankReading
from highwater.process.admin_token import AdminToken, default_token_file
from highwater.process.clocks import Clocks
from highwater.process.state_file import StateFile
from highwater.process.tls import engine_context
from highwater.server.door import DoorWatch
from highwater.server.settings import Settings
from highwater.server.sidecar import wire_data_plane
from highwater.watch.history import History
from highwater.watch.poller import Poller, Reports
from highwater.watch.recorder.recorders import Recorders
from highwater.watch.rounds import PollTimes, Rounds
from highwater.watch.shared_devices import SharedDevices, find_nvml
from highwater.watch.sources import EngineBudgets, Source, polled_sources
from highwater.watch.starts import EngineProcesses

NO_DATA_PLANE = (
    "requests cannot be held here: this sidecar has no data plane (proxy.enabled). With one, and all traffic through "
    "it, they can"
)
MAX_HISTORY_SAMPLES = 86_400  # a day at one a second: 120 MB with eight ranks
_UNSEEN_STARTS = (
    " Whether a start of it ended cannot be seen: recorder_dir (HIGHWATER_RECORDER_DIR for vLLM) or engine_log would "
    "show that"
)

log = logging.getLogger("highwater")


class Parts:
    """The parts around one engine, with the data plane in front of it."""

    def __init__(
        self, settings: Settings, clocks: Clocks, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.settings, self.clocks, self.transport = settings, clocks, transport
        self.counters = Counters()
        self.internal_errors = self.counters.internal_errors
        self.tls = engine_context(settings.engine_url, settings.engine_tls.files)
        self.token = _token(settings)
        self.access = Access(
            self.token,
            port=settings.control_plane_port,
            trust_loopback=settings.trust_loopback,
            denied=self.counters.control_denied,
        )
        self.data = wire_data_plane(
            settings,
            clocks=clocks,
            tls=self.tls,
            observer=self.counters.traffic,
            withhold=self.access.without_token,
            internal_errors=self.internal_errors,
        )
        self.state = StateFile(settings.state_file)
        self.lives = Lives(self.state, started_at=local_start())

    # --- between clients and the engine ---

    @cached_property
    def door(self) -> DoorWatch | None:
        if not self.settings.has_data_plane:
            return None
        return DoorWatch(
            self.data.door,
            self.settings.door,
            budget_of=self.budgets.budget_of,
            host=lambda: None if self.host.now is None else self.host.now.reading,
            level=lambda: self.governor.status().level,
            clock=self.clocks.monotonic,
        )

    def requests_with_images(self) -> Iterator[RequestItems]:
        return self.data.door.requests()

    def requests_under_way(self) -> int:
        return self.data.requests_under_way()

    def requests_ended(self) -> int | None:
        return self.counters.traffic.requests_ended if self.settings.has_data_plane else None

    # --- the engine ---

    @cached_property
    def engine(self) -> Engine:
        return Engine(
            self.settings.engine_url,
            rpc_deadline_seconds=self.settings.rpc_deadline_seconds,
            ssl_context=self.tls,
            transport=self.transport,
            clocks=self.clocks,
        )

    @cached_property
    def recorders(self) -> Recorders | None:
        folder, rate, seconds = self.settings.recorder_dir, self.settings.recorder_rate, self.settings.recorder_seconds
        if folder is None:
            return None
        recorders = Recorders(self.engine, folder, rate=rate, seconds=seconds, clocks=self.clocks)
        if (problem := recorders.files.look()) is not None:
            log.warning("%s; it is read as soon as it can be", problem)
        return recorders

    @cached_property
    def budgets(self) -> EngineBudgets:
        return EngineBudgets(self.engine, self.recorders)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        return polled_sources(self.engine, self.budgets)

    @cached_property
    def reports(self) -> Reports:
        counter = self.internal_errors.counter("poller")
        return Reports(self.engine.url, self.clocks, self.settings.stale_seconds, internal_error=counter)

    # --- the host ---

    @cached_property
    def process_lives(self) -> ProcessLives:
        return ProcessLives(self.host_reader.exists)

    @cached_property
    def oom_kills(self) -> OomKillWatch:
        return OomKillWatch(self.clocks, lambda text: self.history.record("state", text))

    @cached_property
    def host_reader(self) -> HostReader:
        return HostReader(
            self.settings.recorder_dir,
            workers=lambda: self.reports.current().ranks,
            clocks=self.clocks,
        )

    @cached_property
    def host(self) -> HostWatch:
        return HostWatch(
            self.host_reader,
            judge=host_findings,
            counts=self._cache_counts,
            oom_kills=lambda: self.oom_kills.last_hour,
            life=lambda: self.lives.present.id if self.reports.current().engine.traits.is_up else None,
            listeners=(self.process_lives.look, self.oom_kills.look),
            clocks=self.clocks,
            internal_error=self.internal_errors.counter("host"),
        )

    def _cache_counts(self) -> CacheCounts:
        ranks, work = self.reports.current().ranks, self.reports.load.work
        spilled = [rank.encoder_cache.host_bytes for rank in ranks if rank.encoder_cache is not None]
        pinned = [rank.host_memory.pinned_bytes for rank in ranks if rank.host_memory.pinned_bytes is not None]
        return CacheCounts(
            queries=None if work.images is None else int(work.images),
            hits=None if work.images is None or work.new_images is None else int(work.images - work.new_images),
            spilled_bytes=sum(spilled) if spilled else None,
            pinned_bytes=sum(pinned) if pinned else None,
        )

    @cached_property
    def processes(self) -> EngineProcesses:
        is_blind = self.settings.recorder_dir is None and self.settings.engine_log is None
        return EngineProcesses(
            one=self.host.engine_process,
            lives=lambda: self.process_lives.last,
            stopped=self.host.stopped_engine,
            silent_core=self.host.silent_core,
            unseen_starts=_UNSEEN_STARTS if is_blind else "",
        )

    # --- what is seen ---

    @cached_property
    def history(self) -> History:
        samples = min(int(self.settings.history_seconds / self.settings.poll_seconds) + 1, MAX_HISTORY_SAMPLES)
        kept_bytes = self.host.kept_bytes
        return History(samples, clocks=self.clocks, proxied=self.requests_ended, host_kept_bytes=kept_bytes)

    @cached_property
    def shared(self) -> SharedDevices:
        return SharedDevices(
            self.reports.current,
            self.history,
            recorders=None if self.recorders is None else self.recorders.files,
            nvml=find_nvml(),
            internal_error=self.internal_errors.counter("shared_devices"),
        )

    @cached_property
    def poller(self) -> Poller:
        settings = self.settings
        rounds = Rounds(
            self.engine,
            Detection(self.engine, assume_extension=settings.engine_has_extension, clocks=self.clocks),
            self.sources,
            self.recorders,
            PollTimes(
                poll_seconds=settings.poll_seconds,
                idle_poll_seconds=settings.idle_poll_seconds,
                max_step_seconds=settings.max_step_seconds,
            ),
            requests_under_way=self.requests_under_way,
            observer=self.counters,
            clocks=self.clocks,
        )
        return Poller(
            rounds,
            self.history,
            self.lives,
            self.reports,
            processes=self.processes,
            launched=self._launched,
            internal_error=self.internal_errors.counter("poller"),
        )

    def _launched(self, reading: RankReading, version: str | None) -> RankReading:
        launch = launch_of(self.budgets.budget_of(reading), reading, version)
        return replace(reading, launch=launch, shared_with=self.shared.users.get(reading.device_id or ""))

    # --- what acts ---

    @cached_property
    def policy(self) -> PolicyStore:
        policy = PolicyStore(self.state, self.settings.policy)
        if self.state.problem is not None:
            self.history.record("recovery", self.state.problem)
            log.warning("%s", self.state.problem)
        if policy.startup_notice is not None:
            self.history.record("policy", policy.startup_notice)
            log.warning("%s", policy.startup_notice)
        return policy

    @cached_property
    def quiescer(self) -> Quiescer:
        return Quiescer(
            self.engine,
            self.data.gate,
            drain_seconds=self.settings.gate.drain_seconds,
            impossible=None if self.settings.has_data_plane else NO_DATA_PLANE,
            clock=self.clocks.monotonic,
        )

    @cached_property
    def relief(self) -> Relief:
        return Relief(
            self.engine,
            self.poller,
            self.history,
            self.quiescer,
            remedies=all_remedies(host_budget_bytes=self.settings.trim.host_budget_bytes),
            observer=self.counters,
            clock=self.clocks.monotonic,
        )

    @cached_property
    def governor(self) -> Governor:
        return Governor(
            self.relief,
            self.poller,
            self.history,
            rules=self.policy.in_force.rules,
            mode=self.policy.in_force.mode,
            shared_cards=lambda: self.shared.cards,
            observer=self.counters,
            clocks=self.clocks,
            internal_error=self.internal_errors.counter("policy"),
        )

    # --- what explains ---

    @cached_property
    def growth(self) -> GrowthWatch:
        """The watch of growth; its floors are kept beside the state file."""

        async def read_host(idle_seconds: float) -> list[Measured]:
            now = await self.host.read()
            return list(host_series(now.reading, idle_seconds=idle_seconds, ranks=self.reports.current().ranks))

        state = self.settings.state_file
        return GrowthWatch(
            self.history,
            FloorFile(None if state is None else state.with_name(f"{state.name}.growth")),
            host_series=read_host,
            clocks=self.clocks,
            internal_error=self.internal_errors.counter("growth"),
        )

    @cached_property
    def incidents(self) -> Incidents:
        store = self.settings.incidents
        incidents = Incidents(
            IncidentStore(store.folder, keep=store.keep, max_bytes=store.max_bytes),
            engine_log=self.settings.engine_log,
            clocks=self.clocks,
            internal_error=self.internal_errors.counter("diagnosis"),
        )
        if incidents.problem is not None:
            log.warning("%s", incidents.problem)
        if (problem := incidents.log_problem) is not None:
            log.warning("%s; it is read as soon as it can be", problem)
        return incidents

    @cached_property
    def watcher(self) -> IncidentWatcher:
        return IncidentWatcher(
            self.incidents,
            self.history,
            recorders=self.recorders,
            starts=self.poller.starts,
            life=lambda: self.lives.present,
            policy=self.governor.status,
            verdicts=self.growth.verdicts,
            stopped_processes=self.host.stopped_processes,
            oom_kills=self.oom_kills,
            requests=self.requests_with_images,
            read_host=self.host.facts,
            ended_in_order=self.poller.note_stop,
            internal_error=self.internal_errors.counter("incidents"),
        )


def _token(settings: Settings) -> AdminToken:
    if settings.admin_token is not None:
        return AdminToken(settings.admin_token.get_secret_value(), None)
    if settings.admin_token_file is not None:
        return AdminToken(None, settings.admin_token_file)
    return AdminToken(None, default_token_file(settings.control_plane_port, os.environ), is_temporary=True)
