"""The parts that watch the engine and act on it: history, poller, relief, policy."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import httpx

from gated_proxy.gate import Gate
from highwater.accounting.devices import device_id
from highwater.engine.client import Engine
from highwater.engine.detection import Detection
from highwater.engine.life import Lives, local_start
from highwater.files.state_file import StateFile
from highwater.memory.engine_budgets import EngineBudgets
from highwater.memory.history import History
from highwater.memory.poller import Poller
from highwater.memory.rounds import PollObserver, PollTimes, Rounds
from highwater.memory.shared_devices import SharedDevices, find_nvml
from highwater.memory.sources import all_sources
from highwater.memory.sources.source import Source
from highwater.plan.explanation import launch_of
from highwater.policy.governor import ActionObserver, Governor
from highwater.policy.store import PolicyStore
from highwater.process.internal_errors import InternalErrors
from highwater.readings.event import EventKind
from highwater.readings.rank import RankReading
from highwater.recorder.recorders import Recorders
from highwater.relief.quiescer import Quiescer
from highwater.relief.relief import Relief, RemedyObserver
from highwater.relief.remedies import all_remedies
from highwater.settings.settings import Settings

NO_DATA_PLANE = (
    "requests cannot be held here: this sidecar has no data plane (proxy.enabled). With one, and all traffic through "
    "it, they can"
)
MAX_HISTORY_SAMPLES = 86_400  # a day at one a second: 120 MB with eight ranks

log = logging.getLogger("highwater")


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks that every part reads: ``wall``, Unix seconds, for everything that people read.

    ``monotonic`` is for everything that waits or measures. Where the recorders' files are read it must be
    ``CLOCK_MONOTONIC``, which the workers of this machine share.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class CoreObserver(PollObserver, RemedyObserver, ActionObserver, Protocol):
    """Counts polls, remedies and the policy's actions."""


def wire_engine(
    settings: Settings, clocks: Clocks, tls: ssl.SSLContext | None, transport: httpx.AsyncBaseTransport | None
) -> Engine:
    return Engine(
        settings.engine_url,
        rpc_deadline_seconds=settings.rpc_deadline_seconds,
        ssl_context=tls,
        transport=transport,
        clock=clocks.monotonic,
    )


def wire_recorders(settings: Settings, engine: Engine, clocks: Clocks) -> Recorders | None:
    if settings.recorder_dir is None:
        return None
    return Recorders(
        engine,
        settings.recorder_dir,
        rate=settings.recorder_rate,
        seconds=settings.recorder_seconds,
        clock=clocks.wall,
        monotonic=clocks.monotonic,
    )


class Core:
    """The parts that watch the engine and act on it. ``sources`` makes the sources of readings."""

    def __init__(
        self,
        settings: Settings,
        clocks: Clocks,
        engine: Engine,
        recorders: Recorders | None,
        gate: Gate,
        *,
        observer: CoreObserver,
        internal_errors: InternalErrors,
        requests_under_way: Callable[[], int] = lambda: 0,
        proxied: Callable[[], int | None] = lambda: None,
        host_kept_bytes: Callable[[], int | None] = lambda: None,
        sources: Callable[[Engine, EngineBudgets], Sequence[Source]] = all_sources,
    ) -> None:
        self.engine, self.recorders, self.budgets = engine, recorders, EngineBudgets(engine, recorders)
        samples = min(int(settings.history_seconds / settings.poll_seconds) + 1, MAX_HISTORY_SAMPLES)
        self.history = History(
            samples, clock=clocks.wall, monotonic=clocks.monotonic, proxied=proxied, host_kept_bytes=host_kept_bytes
        )
        state = StateFile(settings.state_file)
        self.policy = PolicyStore(state, settings.policy)
        self._record_notice("recovery", state.problem)
        self._record_notice("policy", self.policy.startup_notice)
        rounds = Rounds(
            engine,
            Detection(engine, assume_extension=settings.engine_has_extension, clock=clocks.monotonic),
            sources(engine, self.budgets),
            recorders,
            PollTimes(
                poll_seconds=settings.poll_seconds,
                idle_poll_seconds=settings.idle_poll_seconds,
                stale_seconds=settings.stale_seconds,
                max_step_seconds=settings.max_step_seconds,
            ),
            requests_under_way=requests_under_way,
            observer=observer,
            clock=clocks.monotonic,
            wall_clock=clocks.wall,
        )
        lives = Lives(state, started_at=local_start())
        self.poller = Poller(rounds, self.history, lives, internal_error=internal_errors.counter("poller"))
        self.shared = SharedDevices(
            self.poller.current,
            self.history,
            recorders=None if recorders is None else recorders.files,
            nvml=find_nvml(),
            internal_error=internal_errors.counter("shared_devices"),
        )
        self.poller.launched = self._launched
        self.quiescer = Quiescer(
            engine,
            gate,
            drain_seconds=settings.gate.drain_seconds,
            impossible=None if settings.has_data_plane else NO_DATA_PLANE,
            clock=clocks.monotonic,
        )
        self.relief = Relief(
            engine,
            self.poller,
            self.history,
            self.quiescer,
            remedies=all_remedies(host_budget_bytes=settings.trim.host_budget_bytes),
            observer=observer,
            clock=clocks.monotonic,
        )
        self.governor = Governor(
            self.relief,
            self.poller,
            self.history,
            rules=self.policy.in_force.rules,
            mode=self.policy.in_force.mode,
            shared_cards=lambda: self.shared.cards,
            observer=observer,
            clock=clocks.monotonic,
            wall_clock=clocks.wall,
            internal_error=internal_errors.counter("policy"),
        )
        self.poller.listeners += [self.quiescer.notice, self.governor.notice]
        self.poller.pace = self.governor.poll_interval

    def _launched(self, reading: RankReading, version: str | None) -> RankReading:
        user = self.shared.users.get(device_id(reading) or "")
        return replace(reading, launch=launch_of(self.budgets.budget_of(reading), reading, version), shared_with=user)

    def _record_notice(self, kind: EventKind, notice: str | None) -> None:
        if notice is not None:
            self.history.record(kind, notice)
            log.warning("%s", notice)
