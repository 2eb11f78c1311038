"""The parts that watch the engine and act on it: history, poller, relief, policy. None listens or serves."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx

from highwater.engine.client import Engine
from highwater.engine.life import Lives, local_start
from highwater.files.state_file import StateFile
from highwater.memory.engine_budgets import EngineBudgets
from highwater.memory.history import History
from highwater.memory.poller import Poller
from highwater.memory.rounds import PollObserver, PollTimes, Rounds
from highwater.memory.shared_devices import SharedDevices, find_nvml
from highwater.memory.sources import Source, all_sources
from highwater.policy.governor import ActionObserver, Governor
from highwater.policy.store import PolicyStore
from highwater.process.internal_errors import InternalErrors
from highwater.proxy.gate import Gate
from highwater.readings import EventKind
from highwater.recorder.recorders import Recorders
from highwater.relief import Quiescer, Relief, RemedyObserver
from highwater.relief.remedies import all_remedies
from highwater.settings import Settings
from highwater.wiring.clocks import Clocks

NO_DATA_PLANE = (
    "requests cannot be held here: this sidecar has no data plane (proxy.enabled). With one, and all traffic through "
    "it, they can"
)
MAX_HISTORY_SAMPLES = 86_400  # a day at one a second: 120 MB with eight ranks

log = logging.getLogger("highwater")


class CoreObserver(PollObserver, RemedyObserver, ActionObserver, Protocol):
    """Counts polls, remedies and the policy's actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The parts."""

    engine: Engine
    recorders: Recorders | None
    budgets: EngineBudgets
    history: History
    policy: PolicyStore
    poller: Poller
    shared: SharedDevices
    quiescer: Quiescer
    relief: Relief
    governor: Governor


def wire_engine(
    settings: Settings, clocks: Clocks, tls: ssl.SSLContext | None, transport: httpx.AsyncBaseTransport | None
) -> Engine:
    """Return the engine's client.

    Args:
        settings: All of them.
        clocks: Both of them.
        tls: For an engine on https.
        transport: Replaces the network, in tests.
    """
    return Engine(
        settings.engine_url,
        rpc_deadline_seconds=settings.rpc_deadline_seconds,
        ssl_context=tls,
        transport=transport,
        clock=clocks.monotonic,
    )


def wire_recorders(settings: Settings, engine: Engine, clocks: Clocks) -> Recorders | None:
    """Return the reader of the workers' recorders; None where no folder is set."""
    if settings.recorder_dir is None:
        return None
    return Recorders(
        engine,
        settings.recorder_dir,
        rate=settings.recorder_rate,
        seconds=settings.recorder_seconds,
        max_step_seconds=settings.max_step_seconds,
        clock=clocks.wall,
        monotonic=clocks.monotonic,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreInputs:
    """The parts and values that the core is made of.

    Attributes:
        settings: All of them.
        engine: The engine.
        recorders: The reader of its workers' recorders, if they have any.
        gate: Holds requests while a remedy needs an idle engine.
        clocks: Both of them.
        observer: Counts what happens.
        internal_errors: Counts faults of our own.
        requests_under_way: How many requests are under way through this sidecar.
        sources: Makes the sources of readings.
    """

    settings: Settings
    engine: Engine
    recorders: Recorders | None
    gate: Gate
    clocks: Clocks
    observer: CoreObserver
    internal_errors: InternalErrors
    requests_under_way: Callable[[], int] = lambda: 0
    sources: Callable[[Engine, EngineBudgets], Sequence[Source]] = all_sources


def wire_core(inputs: CoreInputs) -> Core:
    """Wire everything that knows the engine's memory."""
    settings = inputs.settings
    history = History(
        min(int(settings.history_seconds / settings.poll_seconds) + 1, MAX_HISTORY_SAMPLES),
        clock=inputs.clocks.wall,
        monotonic=inputs.clocks.monotonic,
    )
    state = StateFile(settings.state_file)
    policy = PolicyStore(state, settings.policy)
    _record_startup(history, ("recovery", state.problem), ("policy", policy.startup_notice))
    budgets = EngineBudgets(inputs.engine)
    poller = _poller(inputs, budgets, history, state)
    shared = SharedDevices(
        poller.current,
        history,
        recorders=None if inputs.recorders is None else inputs.recorders.files,
        nvml=find_nvml(),
        internal_error=inputs.internal_errors.counter("shared_devices"),
    )
    quiescer, relief = _relief(inputs, poller, history)
    governor = Governor(
        relief,
        poller,
        history,
        rules=[rule.rule() for rule in policy.in_force.rules],
        mode=policy.in_force.mode,
        shared_cards=lambda: shared.cards,
        observer=inputs.observer,
        clock=inputs.clocks.monotonic,
        wall_clock=inputs.clocks.wall,
        internal_error=inputs.internal_errors.counter("policy"),
    )
    poller.listeners += [quiescer.notice, governor.notice]
    poller.pace = governor.poll_interval
    return Core(
        engine=inputs.engine,
        recorders=inputs.recorders,
        budgets=budgets,
        history=history,
        policy=policy,
        poller=poller,
        shared=shared,
        quiescer=quiescer,
        relief=relief,
        governor=governor,
    )


def _poller(inputs: CoreInputs, budgets: EngineBudgets, history: History, state: StateFile) -> Poller:
    settings = inputs.settings
    rounds = Rounds(
        inputs.engine,
        inputs.sources(inputs.engine, budgets),
        inputs.recorders,
        PollTimes(
            poll_seconds=settings.poll_seconds,
            idle_poll_seconds=settings.idle_poll_seconds,
            stale_seconds=settings.stale_seconds,
            max_step_seconds=settings.max_step_seconds,
        ),
        requests_under_way=inputs.requests_under_way,
        engine_has_extension=settings.engine_has_extension,
        observer=inputs.observer,
        clock=inputs.clocks.monotonic,
        wall_clock=inputs.clocks.wall,
    )
    lives = Lives(state, started_at=local_start())
    return Poller(rounds, history, lives, internal_error=inputs.internal_errors.counter("poller"))


def _relief(inputs: CoreInputs, poller: Poller, history: History) -> tuple[Quiescer, Relief]:
    settings, clock = inputs.settings, inputs.clocks.monotonic
    quiescer = Quiescer(
        inputs.engine,
        inputs.gate,
        drain_seconds=settings.gate.drain_seconds,
        impossible=None if settings.has_data_plane else NO_DATA_PLANE,
        clock=clock,
    )
    remedies = all_remedies(host_budget_bytes=settings.trim.host_budget_bytes)
    relief = Relief(inputs.engine, poller, history, quiescer, remedies=remedies, observer=inputs.observer, clock=clock)
    return quiescer, relief


def _record_startup(history: History, *notices: tuple[EventKind, str | None]) -> None:
    """Record what was found at the start, and log it."""
    for kind, notice in notices:
        if notice is not None:
            history.record(kind, notice)
            log.warning("%s", notice)
