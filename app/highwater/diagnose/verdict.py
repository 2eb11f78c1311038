"""The verdict: one state, one sentence with the figure that decides, what grew, the next act, and one thing to do.

It is made of what the report already says, and of nothing else: no reading, no clock. Every face shows it and judges
nothing itself. Only what is so now decides: an incident counts while the engine is down, and never after.

====================== =========================== ============ =================
engine                 memory is fine              short        very short
====================== =========================== ============ =================
ready, busy            ``fine``, ``keeps_up``: 0   ``short``: 1 ``very_short``: 2
slow, paused, sleeping ``slow`` ...: 1             the same     ``very_short``: 2
starting               ``starting``: 1             the same     the same
nothing ever answered  ``unknown``: 1              the same     the same
stuck, ..., gone       ``stuck``, ``silent``,      the same     the same
                       ``dead``: 2; ``dead`` for
                       ``stopped``: 1
nothing read           ``unknown``: 1              the same     the same
ranks are missing      ``unknown``: 1              ``short``: 1 ``very_short``: 2
the policy cannot act  ``cannot_act``: 1           ``short``: 1 ``very_short``: 2
====================== =========================== ============ =================
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from highwater.diagnose.judgement import (
    Deed,
    Judged,
    Reason,
    VerdictState,
    brief,
    capital,
    free_text,
    lasting,
    rules_of,
)
from highwater.diagnose.shortage import fine, grew, kept_up, next_text, reclaim, short, very_short
from highwater.engine.hints import SEEMS_LOADING, STARTS_ENDED, stopped_text
from highwater.model.report import Report
from highwater.model.titles import missing_text
from highwater.model.units import counted, span_text, whole_span_text
from highwater.process.exit_codes import ATTENTION, CRITICAL, OK

__all__ = ["Deed", "JudgedReport", "Reason", "Verdict", "VerdictState", "verdict"]

_STEPS: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_EXIT: Final[Mapping[VerdictState, int]] = {
    **dict.fromkeys(("fine", "keeps_up"), OK),
    **dict.fromkeys(("very_short", "stuck", "silent", "dead"), CRITICAL),
}
_OUTSIDE: Final = frozenset[Reason]({"outside", "neighbour", "grown_outside"})
_OF_MEMORY: Final = frozenset[VerdictState]({"fine", "keeps_up", "short", "very_short"})


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

    @property
    def with_step(self) -> str:
        return f"{self.sentence} {self.step or ''}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedReport(Report):
    """A report as it is shown; ``rank_order``: places in ``ranks``, the worst off first."""

    verdict: Verdict
    rank_order: tuple[int, ...] = ()

    @classmethod
    def of(cls, report: Report) -> JudgedReport:
        known = {field.name: getattr(report, field.name) for field in fields(Report)}
        return cls(**known, verdict=verdict(report), rank_order=report.worst_places)


def verdict(report: Report) -> Verdict:
    judged = next(found for rule in _IN_ORDER if (found := rule(report)) is not None)
    said, is_stopped = _STEPS[judged.reason], judged.reason == "stopped"
    page = f"docs/runbooks/{said['runbook']}.html" if "runbook" in said else None
    is_known = not report.stale and not report.engine.traits.is_absent
    deed = judged.do or (reclaim(report) if judged.state in _OF_MEMORY and is_known else None)
    if deed is None and page is not None and judged.state not in ("fine", "keeps_up"):
        deed = Deed(text="What to do", path=page)
    return Verdict(
        state=judged.state,
        exit_status=ATTENTION if is_stopped else _EXIT.get(judged.state, ATTENTION),
        reason=judged.reason,
        sentence=judged.sentence,
        grew=grew(report, is_outside_said=judged.reason in _OUTSIDE) if is_known else None,
        next=judged.next or (next_text(report) if is_known else None),
        do=deed,
        step=said.get("step"),
        runbook=page,
    )


# --- the engine ---


def _ended(report: Report) -> Judged | None:
    engine = report.engine
    clients = "Clients get 502 until it runs again. " if report.proxy is not None else ""
    by_itself = f"{clients}Highwater does not restart it."
    if engine.stopped_at is not None:
        return Judged("dead", "stopped", f"The engine {stopped_text(engine.stopped_at)}.", by_itself)
    if engine.state != "gone":
        return None
    reasons: dict[str, tuple[Reason, str]] = {
        "killed_by_kernel": ("kernel_oom", "The kernel killed it for memory: its container was full."),
        "device_full": ("device_memory", "Device memory was full."),
        "not_short": ("not_memory", "Device memory was not short."),
        "had_room": (
            "unknown",
            "The device had room when it was last read; whether host memory was short is not known.",
        ),
        "unknown": ("unknown", "Whether memory was short is not known."),
    }
    deed = _incident_deed(report, "See why it ended", "died", "hung")
    reason, memory = reasons["unknown" if deed is None or report.incident is None else report.incident.memory]
    # Without recorders a start that begins is not seen.
    again = "nobody has restarted it" if engine.is_loading is False else "no restart of it is seen"
    text = f"The engine has been dead{lasting(report, engine.since)}, and {again}. {memory}"
    return Judged("dead", reason, text, by_itself, deed)


def _incident_deed(report: Report, text: str, *kinds: str) -> Deed | None:
    """Return the page of the open incident, where it is of one of these kinds: another one tells of another moment."""
    incident = report.incident
    if incident is None or incident.kind not in kinds:
        return None
    return Deed(text=text, path=f"memory/incidents/{incident.id}")


def _hung(report: Report) -> Judged | None:
    engine, progress = report.engine, report.progress
    if not engine.traits.is_hung:
        return None
    said = progress.summary if progress is not None and engine.state == "stuck" else engine.hint
    why = f": {brief(said)}" if said else ""
    deed = _incident_deed(report, "See the stacks", "hung")
    if engine.state == "not_answering":
        return Judged(
            "silent", "no_answer", f"The engine has answered nothing{lasting(report, engine.since)}{why}.", None, deed
        )
    is_starved = progress is not None and progress.is_starved
    what = "schedules nothing" if is_starved else "has hung"
    return Judged(
        "stuck",
        "starved" if is_starved else "hung",
        f"The engine {what}{lasting(report, engine.since)}{why}.",
        "It may go on by itself." if is_starved else "It will not go on by itself.",
        deed,
    )


def _starting(report: Report) -> Judged | None:
    engine, failure = report.engine, report.start_failure
    if engine.state != "starting":
        return None
    took = engine.last_start_seconds
    last = f"; the last start took {span_text(took)}" if took is not None else ""
    since = engine.loading_since or engine.since
    so_far = f", {whole_span_text(max(report.now - since, 0.0))} so far" if report.now is not None and since else ""
    loads = f"The engine is {engine.loading_phase or 'starting'}{so_far}{last}."
    deed = _incident_deed(report, "See why", "start_failed")
    if failure is not None:
        again = f" {loads}" if engine.is_loading else " Nothing loads now."
        return Judged("starting", "start_failed", f"{capital(brief(failure.summary))}.{again}", None, deed)
    _, is_known, ended = (engine.hint or "").partition(STARTS_ENDED)  # the log tells it, and no process of it is left
    if is_known:
        return Judged("starting", "start_failed", f"The engine's last {brief(ended)}. {loads}", None, deed)
    # After one that ended it counts as starting only where that is seen; of a first one its process may be.
    if engine.is_loading or engine.restarts or (engine.hint or "").startswith(SEEMS_LOADING):
        return Judged("starting", "loading", loads, "Memory is judged once it is ready.")
    nothing = capital(brief(engine.hint)) if engine.hint else f"Nothing answers at {engine.url}"
    return Judged("unknown", "unreachable", f"{nothing}; whether an engine starts is not known.")


def _late_or_held(report: Report) -> Judged | None:
    """A slow, paused or sleeping engine: memory stands in its sentence."""
    engine, free = report.engine, free_text(report)
    hint = f": {brief(engine.hint)}" if engine.hint else ""
    memory = f" {free}." if free else ""
    if engine.state == "slow":
        return Judged("slow", "slow", f"The engine answers late{hint}.{memory}")
    if engine.state == "paused":
        return Judged("paused", "paused", f"The engine is paused: it accepts requests and runs none.{memory}")
    if engine.state == "sleeping":
        return Judged("sleeping", "sleeping", f"The engine has been asleep{lasting(report, engine.since)}.{memory}")
    if engine.starved:
        return Judged("slow", "replica_starved", f"{capital(brief(engine.starved[0]))}.{memory}")
    return None


# --- what is read ---


def _unread(report: Report) -> Judged | None:
    check = Deed(text="What is missing", path="docs/runbooks/HighwaterMemoryUnknown.html")
    hint = report.engine.hint
    if report.are_workers_hidden and report.engine.traits.answers:
        text = "The workers cannot be read: no worker extension, no recorders."
        return Judged("unknown", "not_read", text, f"{capital(brief(hint))}." if hint else None, check)
    if not report.ranks:
        return Judged(
            "unknown", "not_read", f"No worker has been read yet{f': {brief(hint)}' if hint else ''}.", None, check
        )
    if report.stale:
        age = "" if report.age_seconds is None else f" for {whole_span_text(report.age_seconds)}"
        then = f" {free}." if (free := free_text(report)) else ""
        return Judged(
            "unknown", "not_read", f"The workers have not been read{age}.{then}", "The policy does nothing.", check
        )
    return None


def _missing(report: Report) -> Judged | None:
    missing = 0 if report.ranks_expected is None else report.ranks_expected - report.ranks_reported
    if missing <= 0:
        return None
    named = f" ({brief(missing_text(report.ranks_missing))})" if report.ranks_missing else ""
    are = "is" if missing == 1 else "are"
    of = counted(report.ranks_expected or 0, "rank")
    text = f"{missing} of {of} {are} not read{named}. {free_text(report) or ''}"
    return Judged(
        "unknown",
        "ranks_missing",
        f"{text.strip().rstrip('.')}.",
        "No rule watches the memory of ranks that are not read.",
    )


def _held(report: Report) -> Judged | None:
    rule = next((one for one in rules_of(report) if one.is_dormant), None)
    if rule is None:
        return None
    why, _, change = (rule.reason or "its signal is not known").partition(". ")
    deed = Deed(text=change.rstrip(".") or "What to change", path="docs/runbooks/HighwaterPolicyNotActing.html")
    text = f"Rule {rule.name} cannot act: {brief(why.removeprefix(f'{rule.name}.'))}."
    return Judged("cannot_act", "rule_held", text, "Nothing is given back by this rule.", deed)


# --- in order: the first that applies ---

_IN_ORDER: Final[tuple[Callable[[Report], Judged | None], ...]] = (
    *(_ended, _hung, _starting, very_short, _late_or_held, _unread),
    *(short, _missing, _held, kept_up, fine),
)
