"""The rule book: the questions asked of an incident and of a measured load, a file a topic. Pure.

A rule returns a finding, or ``None``: also where a figure that it needs is not known. A new rule is a function in its
topic's file, a line here that says where it applies, and its sentences in findings.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

from highwater.diagnose.advice import for_given_pool, without_effect
from highwater.diagnose.case import Case
from highwater.diagnose.evidence import Evidence
from highwater.diagnose.finding import Finding, weightiest_first, without_advice
from highwater.diagnose.rules import allocator, caches, device, ending, growth, host, policy, words

Rule: TypeAlias = Callable[[Case], Finding | None]
IncidentRule: TypeAlias = Callable[[Case, Evidence], Finding | None]
Failed: TypeAlias = Callable[[Exception], None]

# Causes that are known for what grew: said before what only describes a full device.
KNOWN_CAUSES: Final[tuple[Rule, ...]] = (growth.without_expandable_segments, caches.encoder_not_profiled)
KNOWN_CAUSE_NAMES: Final = frozenset(rule.__name__ for rule in KNOWN_CAUSES)
# In the order in which findings of the same weight are shown.
OF_INCIDENTS: Final[tuple[IncidentRule, ...]] = (
    ending.hang_ended,
    ending.killed_by_kernel,
    words.failed_allocation,
    words.host_shortage,
    device.device_full,
    ending.stopped_ranks,
    ending.lost_ranks,
    ending.long_step,
    ending.ended_by_signal,
    ending.kill_not_known,
    ending.cause_not_known,
    policy.policy,
    device.device_had_room,
    ending.no_readings,
)
ANYWHERE: Final[tuple[Rule, ...]] = (
    allocator.ooms,
    allocator.unused_reserve,
    host.host_memory,
    growth.leaks,
    growth.growth,
    device.over_budget,
    allocator.alloc_retries,
    caches.encoder_cache,
    device.skew,
    caches.kv_cache_full,
)


def judged(case: Case, internal_error: Failed | None = None) -> list[Finding]:
    """Return what the rules find, the weightiest first; with ``internal_error`` one that raises costs only itself."""

    def ask(rule: Callable[..., Finding | None], *known: Case | Evidence) -> Finding | None:
        try:
            return rule(*known)
        except Exception as exc:  # broad: the caller logs and counts it, and the others' findings are worth more
            if internal_error is None:
                raise
            internal_error(exc)
            return None

    evidence = case.evidence
    of_incident = [] if evidence is None else [ask(rule, case, evidence) for rule in OF_INCIDENTS]
    causes = weightiest_first(ask(rule, case) for rule in KNOWN_CAUSES)
    found = weightiest_first((*causes, *of_incident, *(ask(rule, case) for rule in ANYWHERE)))
    pointless = without_effect(rank.now for rank in case.ranks)
    is_explained = any(one.name == growth.without_expandable_segments.__name__ for one in causes)
    if is_explained and not any(rank.now.shared_with for rank in case.ranks):
        pointless |= {"other_processes"}
    if case.is_pool_given:
        found = [replace(one, advice=for_given_pool(one.advice)) for one in found]
    return [without_advice(one, pointless) for one in found]


def known_causes(case: Case) -> list[Finding]:
    return weightiest_first(rule(case) for rule in KNOWN_CAUSES)
