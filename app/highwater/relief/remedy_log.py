"""Writes down how each requested remedy ended, also one that was refused, failed or cancelled."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, Protocol

from highwater.memory.history import History
from highwater.readings.event import Caller, Trigger
from highwater.readings.remedy import Mode, Outcome, RemedyResult
from highwater.relief.remedies.remedy import NO_OPTIONS, Remedy, RunOptions
from highwater.units import MIB, mib

log = logging.getLogger("highwater.relief")


class RemedyObserver(Protocol):
    def remedy_ended(self, result: RemedyResult, trigger: Trigger) -> None:
        """One remedy was run, refused or failed."""


@dataclass(frozen=True, slots=True)
class RemedyRun:
    remedy: Remedy
    trigger: Trigger
    mode: Mode = "safe"
    rule: str | None = None
    options: RunOptions = NO_OPTIONS
    force: bool = False
    dry_run: bool = False
    release_after: bool = True
    caller: Caller | None = None


class RemedyLog:
    def __init__(self, history: History, observer: RemedyObserver) -> None:
        self._history = history
        self._observer = observer

    def add(self, run: RemedyRun, result: RemedyResult) -> None:
        if run.dry_run:
            return
        self._observer.remedy_ended(result, run.trigger)
        kind: Literal["refusal", "reset"] = "refusal" if result.outcome == "refused" else "reset"
        summary = summary_of(result)
        self._history.record(kind, summary, trigger=run.trigger, rule=run.rule, result=result, caller=run.caller)
        by = f"{run.trigger} by {run.caller.address or 'an unknown peer'}" if run.caller else run.trigger
        log.info("%s (%s)", summary, run.rule or by)


def summary_of(result: RemedyResult) -> str:
    summary = f"{result.remedy} {result.outcome}"
    if result.outcome == "done" and result.credited_bytes is not None:
        together = f", {len(result.ranks)} ranks together," if len(result.ranks) > 1 else ""
        summary += f", gave back {mib(result.credited_bytes)} MiB{together} in {result.seconds:.2f} s"
        less = result.freed_bytes
        if less is not None and abs(less - result.credited_bytes) >= MIB:
            summary += f"; {mib(abs(less))} MiB {'less' if less >= 0 else 'more'} in use now"
    if result.reason:
        summary += f": {result.reason}"
    return summary


def result_of(remedy: Remedy, outcome: Outcome, *, reason: str | None) -> RemedyResult:
    return RemedyResult(
        remedy=remedy.name,
        outcome=outcome,
        reason=reason,
        frees=remedy.traits.frees,
        does_not_free=remedy.traits.does_not_free,
    )
