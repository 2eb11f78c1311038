"""The verdict: one state, one sentence with the figure that decides, what grew, the next act, and one thing to do.

It is made of what the report already says, and of nothing else: no reading, no clock.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from highwater.model.components import BY_NAME
from highwater.model.engine import EngineState
from highwater.model.rank import RankReading
from highwater.model.report import Report
from highwater.model.units import size_text, span_text
from highwater.process.exit_codes import ATTENTION, CRITICAL, OK

VerdictState: TypeAlias = Literal[
    "fine",
    "keeps_up",
    "short",
    "very_short",
    "slow",
    "paused",
    "sleeping",
    "starting",
    "stuck",
    "silent",
    "dead",
    "unknown",
    "cannot_act",
]
# Why it is in that state, for programs: the names of the tables in verdict.toml.
Reason: TypeAlias = Literal[
    "none",
    "relief",
    "growing",
    "releasable",
    "neighbour",
    "in_use",
    "observe",
    "leak",
    "host_memory",
    "slow",
    "paused",
    "sleeping",
    "loading",
    "start_failed",
    "unreachable",
    "hung",
    "starved",
    "no_answer",
    "stopped",
    "kernel_oom",
    "device_memory",
    "not_memory",
    "unknown",
    "not_read",
    "ranks_missing",
    "rule_held",
]
_STEPS: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_OF_ENGINE: Final[Mapping[EngineState, VerdictState]] = {
    "starting": "starting",
    "stuck": "stuck",
    "not_answering": "silent",
    "gone": "dead",
    "slow": "slow",
    "paused": "paused",
    "sleeping": "sleeping",
}
_EXIT: Final[Mapping[VerdictState, int]] = {
    **dict.fromkeys(("fine", "keeps_up"), OK),
    **dict.fromkeys(("very_short", "stuck", "silent", "dead"), CRITICAL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What somebody can do now.

    Attributes:
        path: Where to send ``body``; with no body, the page that says how; ``None``: nothing that a sidecar can do.
        bytes: What that gives back, over all ranks.
    """

    text: str
    path: str | None = None
    body: Mapping[str, Any] | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``exit_status`` is that of `highwater status`; ``next`` is what happens by itself.

    Attributes:
        step: The first thing to look at or do in this very state, in one sentence; ``runbook``: its whole page.
    """

    state: VerdictState
    exit_status: int
    reason: Reason
    sentence: str
    grew: str | None = None
    next: str | None = None
    do: Deed | None = None
    step: str | None = None
    runbook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedReport(Report):
    verdict: Verdict

    @classmethod
    def of(cls, report: Report) -> JudgedReport:
        return cls(**{field.name: getattr(report, field.name) for field in fields(Report)}, verdict=verdict(report))


def verdict(report: Report) -> Verdict:
    state = _state(report)
    reason = _reason(report, state)
    said = _STEPS[reason]
    parts = [
        f"The engine is {report.engine.state_text}." if state in _OF_ENGINE.values() else "",
        _of_memory(report, state),
    ]
    return Verdict(
        state=state,
        exit_status=_EXIT.get(state, ATTENTION) if report.engine.stopped_at is None else ATTENTION,
        reason=reason,
        sentence=" ".join(filter(None, parts)),
        grew=_grew(report),
        next=_next(report),
        do=_do(report, state),
        step=said.get("step"),
        runbook=f"docs/runbooks/{said['runbook']}.html" if "runbook" in said else None,
    )


_REASONS: Final[Mapping[VerdictState, Reason]] = {
    "fine": "none",
    "keeps_up": "relief",
    "slow": "slow",
    "paused": "paused",
    "sleeping": "sleeping",
    "starting": "loading",
    "stuck": "hung",
    "silent": "no_answer",
    "dead": "unknown",
    "unknown": "not_read",
    "cannot_act": "rule_held",
}


def _reason(report: Report, state: VerdictState) -> Reason:
    if state in ("short", "very_short"):
        return "releasable" if any(rank.releasable_bytes for rank in report.ranks) else "in_use"
    return _REASONS[state]


def _state(report: Report) -> VerdictState:
    policy, engine = report.policy, _OF_ENGINE.get(report.engine.state)
    if engine in ("starting", "stuck", "silent", "dead"):
        return engine
    if policy is not None and policy.level == "urgent":
        return "very_short"
    if engine is not None:
        return engine
    return "unknown" if report.stale or not report.ranks else _state_of_memory(report)


def _state_of_memory(report: Report) -> VerdictState:
    if report.policy is not None and report.policy.level == "short":
        return "short"
    if report.policy is not None and any(rule.is_dormant for rule in report.policy.rules):
        return "cannot_act"
    return "keeps_up" if report.growth.refill_seconds is not None else "fine"


def _worst(report: Report) -> RankReading | None:
    known = [rank for rank in report.ranks if rank.free_bytes is not None]
    return min(known, key=lambda rank: rank.free_bytes or 0, default=None)


def _of_memory(report: Report, state: VerdictState) -> str:
    worst = _worst(report)
    if worst is None:
        return "Nothing has been read yet."
    name = worst.name.capitalize() if len(report.ranks) > 1 else "The device"
    was = "had" if report.stale else "has"
    free = f"{name} {was} {size_text(worst.free_bytes)} free of {size_text(worst.total_bytes)}"
    growth = report.growth
    if growth.refill_seconds is not None:
        return f"{free}; it fills each {span_text(growth.refill_seconds)} and is given back each time."
    pressure = report.pressure_of(worst)
    if state in ("short", "very_short") and pressure is not None and pressure.short_bytes:
        return f"{free}, {size_text(pressure.short_bytes)} too little."
    if growth.seconds_to_full is not None and not report.stale:
        return f"{free} and is full in {span_text(growth.seconds_to_full)}."
    return f"{free}."


def _grew(report: Report) -> str | None:
    rate, name = report.growth.bytes_per_second, report.growth.component
    if rate is None or name is None or report.stale:
        return None
    return f"{BY_NAME[name].title} grows by {size_text(round(rate))}/s"


def _next(report: Report) -> str | None:
    if report.engine.hint:
        return report.engine.hint
    policy, worst = report.policy, _worst(report)
    pressure = None if worst is None else report.pressure_of(worst)
    if policy is None or report.stale:
        return None
    dormant = next((rule.reason for rule in policy.rules if rule.is_dormant), None)
    if dormant is not None:
        return dormant
    if pressure is None or pressure.high_free_bytes is None:
        return None
    if pressure.short_bytes:
        return "Highwater gives memory back where it can." if policy.mode == "act" else "Highwater only watches."
    acts = "gives" if policy.mode == "act" else "only watches; it would give"
    return f"Highwater {acts} memory back below {size_text(pressure.high_free_bytes)} free."


def _do(report: Report, state: VerdictState) -> Deed | None:
    if state in ("stuck", "silent", "dead"):
        return Deed(text="What to check", path="docs/runbooks/HighwaterEngineGone.html")
    gain = sum(rank.releasable_bytes or 0 for rank in report.ranks)
    if report.stale or not gain or not report.engine.traits.takes_remedies:
        return None
    text = f"Reclaim {size_text(gain)}"
    return Deed(text=text, path="memory/reclaim", body={"remedies": ["release"], "mode": "safe"}, bytes=gain)
