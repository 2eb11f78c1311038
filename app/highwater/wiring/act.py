"""The parts that act on the engine: the policy, what it may do, and the quiet that this needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from highwater.memory.history import History
from highwater.memory.poller import Poller
from highwater.memory.shared_devices import SharedDevices
from highwater.policy.governor import ActionObserver, Governor
from highwater.policy.store import PolicyStore
from highwater.process.clocks import Clocks
from highwater.process.internal_errors import InternalErrors
from highwater.proxy.gate import Gate
from highwater.relief.quiescer import Quiescer
from highwater.relief.relief import Relief
from highwater.relief.remedies import all_remedies
from highwater.relief.remedy_log import RemedyObserver
from highwater.settings.settings import Settings
from highwater.wiring.watch import Known

NO_DATA_PLANE = (
    "requests cannot be held here: this sidecar has no data plane (proxy.enabled). With one, and all traffic through "
    "it, they can"
)

log = logging.getLogger("highwater")


class ActObserver(RemedyObserver, ActionObserver, Protocol):
    """Counts remedies and the policy's actions."""


@dataclass(frozen=True, slots=True)
class Acting:
    policy: PolicyStore
    quiescer: Quiescer
    relief: Relief
    governor: Governor


def wire_policy(settings: Settings, known: Known, history: History) -> PolicyStore:
    policy = PolicyStore(known.state, settings.policy)
    if known.state.problem is not None:
        history.record("recovery", known.state.problem)
        log.warning("%s", known.state.problem)
    if policy.startup_notice is not None:
        history.record("policy", policy.startup_notice)
        log.warning("%s", policy.startup_notice)
    return policy


def wire_acting(
    settings: Settings,
    known: Known,
    poller: Poller,
    history: History,
    *,
    policy: PolicyStore,
    shared: SharedDevices,
    gate: Gate,
    clocks: Clocks,
    observer: ActObserver,
    internal_errors: InternalErrors,
) -> Acting:
    quiescer = Quiescer(
        known.engine,
        gate,
        drain_seconds=settings.gate.drain_seconds,
        impossible=None if settings.has_data_plane else NO_DATA_PLANE,
        clock=clocks.monotonic,
    )
    relief = Relief(
        known.engine,
        poller,
        history,
        quiescer,
        remedies=all_remedies(host_budget_bytes=settings.trim.host_budget_bytes),
        observer=observer,
        clock=clocks.monotonic,
    )
    governor = Governor(
        relief,
        poller,
        history,
        rules=policy.in_force.rules,
        mode=policy.in_force.mode,
        shared_cards=lambda: shared.cards,
        observer=observer,
        clock=clocks.monotonic,
        wall_clock=clocks.wall,
        internal_error=internal_errors.counter("policy"),
    )
    for listener in (quiescer.notice, governor.notice):
        known.reports.subscribe(listener)
    return Acting(policy, quiescer, relief, governor)
