"""An incident's diagnosis: the rules' findings, weighed against one another and the log, and the summary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from highwater import __version__
from highwater.diagnose.case import Case, given, of_incident
from highwater.diagnose.evidence import Evidence, Incident, IncidentKind, RankEvidence
from highwater.diagnose.finding import Advice, Finding, for_given_pool, weightiest_first
from highwater.diagnose.log.messages import LogMessage, ended_by_signal
from highwater.diagnose.log.story import LogStory, QuotedException
from highwater.diagnose.rules.book import Failed, judged
from highwater.diagnose.rules.device import has_run_out, is_acquitted
from highwater.model.report import Event, MemoryAtEnd
from highwater.process.untrusted import cleaned, plain

MAX_STACK, MAX_ENTRIES = 16, 20
MAX_EVENTS, MAX_DECISIONS = 200, 20
_WHAT: Final[Mapping[IncidentKind, str]] = {
    "died": "The engine died",
    "hung": "The engine hung",
    "out_of_memory": "The engine ran out of memory",
    "start_failed": "The engine did not start",
}
# Where memory was not short these explain nothing: they say how it was used.
_OF_MEMORY_IN_USE: Final = frozenset(
    {
        *("unused_reserve", "growth", "over_budget", "encoder_cache", "skew", "policy"),
        *("without_expandable_segments", "encoder_not_profiled"),
    }
)
# Any of these says that memory was short.
_OF_SHORTAGE: Final = frozenset({"ooms", "device_full", "alloc_retries", "host_memory", "killed_by_kernel"})
# What these advise follows from readings; the figures of a failed allocation are newer, and say what helps.
_BY_READINGS: Final = frozenset({"ooms", "alloc_retries", "device_full", "over_budget", "unused_reserve"})
_REFUSED: Final = "the engine refused to start: "
# Of an exception, in a summary.
_MAX_QUOTE: Final = 300
# What an incident keeps of its evidence as it is.
_KEPT: Final = ("kind", "at", "engine", "reason", "still_seconds", "ranks", "growth", "requests", "policy")

log = logging.getLogger("highwater.diagnose.incidents")


def concluded(evidence: Evidence, story: LogStory, incident_id: str, count_error: Callable[[], None]) -> Incident:
    """Return the incident; what cannot be diagnosed is logged and counted, and costs only itself."""
    notes = [story.problem or ("" if story.messages else story.unheard)]
    evidence = harmless(replace(evidence, ended_by_signal=ended_by_signal(story.messages)))
    case = of_incident(evidence, story)
    findings: Sequence[Finding] = ()

    def internal_error(exc: Exception) -> None:
        count_error()
        log.error("the evidence of an incident could not be diagnosed kind=%s", evidence.kind, exc_info=exc)
        notes.append("not all numbers could be diagnosed; the sidecar's log says why")

    try:
        findings = diagnose(case, internal_error)
    except Exception as exc:  # noqa: BLE001 - logged and counted there; nobody can collect a dying engine's evidence again
        internal_error(exc)
    if evidence.hang is not None:
        known = {found.name for found in findings}
        findings = weightiest_first((*findings, *(each for each in evidence.hang.findings if each.name not in known)))
    decisions = [event for event in evidence.events if "policy" in (event.kind, event.trigger)]
    return Incident(
        id=incident_id,
        last_at=evidence.at,
        summary=summarize(case, findings),
        memory=memory_at_end(case, findings),
        start=evidence.start.id if evidence.start is not None else None,
        findings=tuple(findings),
        messages=(*advised(case, findings), *story.older),
        exception=cleaned(story.exception),
        events=_last(evidence.events, MAX_EVENTS),
        decisions=_last(decisions, MAX_DECISIONS),
        notes=tuple(filter(None, dict.fromkeys(notes))),
        written_by=__version__,
        **{name: getattr(evidence, name) for name in _KEPT},
    )


def _last(events: Sequence[Event], most: int) -> tuple[Event, ...]:
    """Return the last events, oldest first, without a remedy's details: its summary has the outcome."""
    return tuple(replace(event, result=None) for event in sorted(events, key=lambda event: event.at)[-most:])


def diagnose(case: Case, failed: Failed | None = None) -> tuple[Finding, ...]:
    """Return the findings, weighed against one another; the engine's log may show a shortage that no number shows."""
    found = judged(case, failed)
    if _had_room(case, found):
        found = [replace(one, weight="note") if one.name in _OF_MEMORY_IN_USE else one for one in found]
    if any(one.name == "failed_allocation" for one in found):
        found = [replace(one, advice=()) if one.name in _BY_READINGS else one for one in found]
    return tuple(weightiest_first(found))


def advised(case: Case, findings: Sequence[Finding]) -> tuple[LogMessage, ...]:
    """Return the log's messages, without advice that the figures of one, a cause beside it, or a flag make void."""
    has_figures = any(finding.name == "failed_allocation" for finding in findings)

    def advice(message: LogMessage) -> tuple[Advice, ...]:
        known = message.known
        # What these advise holds until figures advise better; a start's refusals have advice of their own.
        is_figured = known is not None and known.of_memory == "device" and not known.at_start
        if (has_figures and is_figured) or (case.log.cause is not None and message.part in {"end", "wait"}):
            return ()
        return for_given_pool(message.advice) if case.is_pool_given else message.advice

    return tuple(replace(message, advice=advice(message)) for message in case.log.messages)


def summarize(case: Case, findings: Sequence[Finding]) -> str:
    """Return what happened, what the log says of it, what is known to be fine, and what the numbers say.

    A second sentence has what the sidecar saw. A clue is part of the first only where nothing else is known, and never
    one about memory that was not short.
    """
    evidence, story = given(case.evidence), case.log
    cause, has_figures = story.cause, any(one.name == "failed_allocation" for one in findings)
    repeated = {"device_full"} if has_figures else set()
    likely = [one.title for one in findings if one.weight == "likely" and one.name not in repeated]
    said = cause or next((message for message in story.messages if message.part != "event"), None)
    raised, is_known = story.exception, cause is not None or bool(likely)
    parts = []
    if cause is None and raised is not None and (said is None or not raised.follows):
        parts.append(exception_title(raised) + (f': "{plain(raised.text, _MAX_QUOTE)}"' if raised.text else ""))
    if said is not None and said.title != _WHAT[evidence.kind].lower():
        parts.append(f"the log says that {said.title.removeprefix(_REFUSED)}")
    parts += likely[:2]
    parts += [finding.title for finding in findings if finding.name == "ended_by_signal" and finding.weight != "likely"]
    if _had_room(case, findings):
        room = next(finding.title for finding in findings if finding.name == "device_had_room")
        parts += [f"device memory was not short ({room})"] if is_acquitted(case) else [room]
        is_outside = any(finding.name == "hang_ended" and finding.weight == "likely" for finding in findings)
        parts += [finding.title for finding in findings if finding.name == "kill_not_known" and not is_outside]
    elif not is_known and (raised is None or raised.follows):
        parts += [title for finding in findings if finding.weight == "clue" and (title := finding.title) not in parts][
            :1
        ]
    if evidence.kind == "start_failed" and evidence.reason and said is None and raised is None:
        # Of processes that left no rank the reason has all figures.
        return f"{_WHAT[evidence.kind]}: {'; '.join([evidence.reason, *(parts if evidence.ranks else ())])}"
    if evidence.kind == "start_failed" and said is None and raised is None and story.was_understood:
        parts.insert(0, "its log ends without an error")
    if not parts:
        parts = ["the cause is not known"]
    if (story.is_cut and not is_known) or (said is None and raised is None and (story.lines > 0 or not likely)):
        parts += [story.unheard] if story.unheard else []
    seen = f". What the sidecar saw: {evidence.reason}" if evidence.reason else ""
    return f"{_WHAT[evidence.kind]}: {'; '.join(parts)}{seen}"


def memory_at_end(case: Case, findings: Sequence[Finding]) -> MemoryAtEnd:
    if case.is_killed_by_kernel:
        return "killed_by_kernel"
    if has_run_out(case):
        return "device_full"
    if not _had_room(case, findings) or all(rank.now.device.traits.is_host_memory for rank in case.ranks):
        return "unknown"  # on CPU there is no device, and a host with room says nothing of a container's limit
    is_kill_known = all(found.name != "kill_not_known" for found in findings)
    return "not_short" if is_acquitted(case) and is_kill_known else "had_room"


def ended_in_order(evidence: Evidence, story: LogStory) -> bool:
    is_killed = evidence.oom_kills is not None and evidence.oom_kills.count > 0
    has_raised = story.exception is not None and not story.exception.before
    has_cause = story.cause is not None or has_raised or bool(story.failed)
    is_in_order = story.ended_in_order or evidence.are_closed
    return evidence.kind == "died" and is_in_order and not is_killed and not has_cause


def exception_title(exception: QuotedException) -> str:
    name = exception.process.partition(" pid=")[0] or "a process of the engine"
    name += f" (pid {exception.pid})" if exception.pid is not None else ""
    before = f", {exception.before} before the log's end" if exception.before else ""
    if not exception.text:
        return f"{name} hit an exception that the log does not show{before}"
    return f"an exception of {name}{before}" if before else f"the last exception of {name}"


def _had_room(case: Case, findings: Sequence[Finding]) -> bool:
    is_short, names = case.kind == "out_of_memory" or case.log.names_memory(), {finding.name for finding in findings}
    return not is_short and not case.log.failed and "device_had_room" in names and names.isdisjoint(_OF_SHORTAGE)


# --- the evidence ---


def joined(ranks: tuple[RankEvidence, ...], before: tuple[RankEvidence, ...]) -> tuple[RankEvidence, ...]:
    known = {(rank.key, rank.pid): rank for rank in before}
    joined = []
    for rank in ranks:
        was = known.pop((rank.key, rank.pid), rank)
        series = max(rank.series, was.series, key=len)
        joined.append(replace(rank, series=series, stack=rank.stack or was.stack, entries=rank.entries or was.entries))
    return (*joined, *known.values())


def harmless(evidence: Evidence) -> Evidence:
    """Return it with every text as one plain line and every list bounded. A series has no texts, and many points."""
    bare = replace(evidence, ranks=tuple(replace(rank, series=()) for rank in evidence.ranks))
    clean = cleaned(bare)
    ranks = tuple(
        replace(rank, series=was.series, stack=rank.stack[:MAX_STACK], entries=rank.entries[:MAX_ENTRIES])
        for rank, was in zip(clean.ranks, evidence.ranks, strict=True)
    )
    return replace(clean, ranks=ranks)
