"""The rule book: the questions asked of a case, a file a topic, and where each applies. Pure.

A rule returns a finding, or ``None``: also where a figure that it needs is not known. A new rule is a function in its
topic's file, a line here that says where it applies, and its sentences in findings.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from highwater.diagnose.case import Case, of_report
from highwater.diagnose.finding import (
    Finding,
    Where,
    advices,
    for_given_pool,
    weightiest_first,
    without_effect,
)
from highwater.diagnose.rules import device, growth, host, life, load, setup
from highwater.explain.explanation import Explanation
from highwater.host.report import GrownPart, HostFinding, HostReport
from highwater.model.report import SCHEMA, Report

Failed: TypeAlias = Callable[[Exception], None]


class Rule(NamedTuple):
    """A question: of a set-up it answers with a sentence where all is as it should be."""

    ask: Callable[[Case], Finding | str | None]
    where: frozenset[Where]

    @property
    def name(self) -> str:
        return self.ask.__name__


def _at(where: Iterable[Where], *asked: Callable[[Case], Finding | str | None]) -> tuple[Rule, ...]:
    return tuple(Rule(ask, frozenset(where)) for ask in asked)


# In the order in which findings of the same weight are shown. Causes that are known for what grew come first: they are
# said before what only describes a full device.
KNOWN_CAUSES: Final = _at(
    ("incident", "load", "running", "start"), growth.without_expandable_segments, growth.encoder_not_profiled
)
RULES: Final[tuple[Rule, ...]] = (
    *KNOWN_CAUSES,
    *_at(
        ("incident",),
        life.hang_ended,
        life.killed_by_kernel,
        device.failed_allocation,
        host.host_shortage,
        device.device_full,
        life.stopped_ranks,
        life.lost_ranks,
        life.long_step,
        life.ended_by_signal,
        life.kill_not_known,
        life.cause_not_known,
        life.policy,
        device.device_had_room,
        life.no_readings,
    ),
    *_at(("incident", "load", "running"), device.ooms),
    *_at(("incident", "load"), device.unused_reserve, host.host_memory),
    *_at(("incident", "load", "running"), growth.leaks),
    *_at(("incident", "load"), growth.growth),
    *_at(("incident", "load", "running"), device.over_budget, device.alloc_retries),
    *_at(("incident", "load"), growth.encoder_cache, device.skew),
    *_at(("incident", "load", "running"), growth.kv_cache_full),
    *_at(
        ("load",),
        load.load_failed,
        load.engine_incident,
        load.engine_restarted,
        load.no_traffic,
        load.headroom,
        load.no_growth,
        load.ineffective_remedies,
        load.gave_back,
        load.refused_remedies,
        load.non_torch_growth,
        load.host_growth,
        load.over_high_water,
        load.unseen_peak,
        load.stale_readings,
        load.other_traffic,
        load.others_acted,
        load.policy_acted,
        load.transient_peak,
        load.kv_pool,
        load.no_remedy,
    ),
    *_at(
        ("start",),
        life.not_profiled,
        life.negative_graphs_estimate,
        life.activation_above_profile,
        life.allocator_environment,
    ),
    *_at(
        ("host",),
        host.container_oom_kills,
        host.container_nearly_full,
        host.memory_pressure,
        host.shm_promised_too_much,
        host.shm_too_small,
        host.shm_left_over,
        host.processor_caches_too_large,
    ),
    *_at(("set-up",), *setup.CHECKS.values()),
)
KNOWN_CAUSE_NAMES: Final = frozenset(rule.name for rule in KNOWN_CAUSES)


def judged(case: Case, internal_error: Failed | None = None) -> list[Finding]:
    """Return what the rules of its place find, the weightiest first; advice that this engine cannot follow is left out.

    With ``internal_error`` a rule that raises costs only itself.
    """
    found: list[Finding] = []
    for rule in RULES:
        if case.where in rule.where:
            try:
                answer = rule.ask(case)
            except Exception as exc:  # broad: the caller logs and counts it, and the others' findings are worth more
                if internal_error is None:
                    raise
                internal_error(exc)
            else:
                found += [answer] if isinstance(answer, Finding) else []
    pointless = without_effect(rank.now for rank in case.ranks)
    is_explained = any(one.name == growth.without_expandable_segments.__name__ for one in found)
    if is_explained and not any(rank.now.shared_with for rank in case.ranks):
        pointless |= {"other_processes"}
    # Before an engine was asked what it can do, every capability is False, and no version is known.
    if case.engine.version is not None and case.engine.capabilities.get("reset_encoder_cache") is False:
        pointless |= {"reset_encoder_cache"}
    dropped = advices(pointless)
    for place, one in enumerate(found):
        advice = for_given_pool(one.advice) if case.is_pool_given else one.advice
        found[place] = replace(one, advice=tuple(each for each in advice if each not in dropped))
    return weightiest_first(found)


def known_causes(case: Case) -> list[Finding]:
    return [found for found in judged(case) if found.name in KNOWN_CAUSE_NAMES]


# --- as two answers have them ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A running engine explained, as ``GET /memory/budget`` returns it; ``taken_at`` is ``None`` before a reading."""

    schema: int = SCHEMA
    taken_at: float | None = None
    engine_state: str | None = None
    explanation: Explanation
    findings: tuple[Finding, ...] = ()


def explained(report: Report, explanation: Explanation) -> Explained:
    found = judged(of_report("start", report, explanation=explanation))
    state = report.engine.state
    return Explained(taken_at=report.taken_at, engine_state=state, explanation=explanation, findings=tuple(found))


def host_findings(report: HostReport, grown: Sequence[GrownPart]) -> tuple[HostFinding, ...]:
    """Return the findings on host memory as the report has them; ``grown``: the most first."""
    return tuple(
        HostFinding(
            name=one.name,
            level="note" if one.weight == "note" else "warning",
            text=one.sentence,
            advice=" ".join(advice.text for advice in one.advice),
        )
        for one in judged(Case(kind="host", host_report=report, host_grown=grown))
    )
