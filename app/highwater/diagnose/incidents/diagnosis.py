"""An incident's diagnosis: its evidence as a case for the rules, their findings, and the summary. Pure.

In the case each rank's reading and series become one reading: the series may reach further than the last full reading
(a recorder writes more often than the poller reads), and the reading has figures that a series does not keep. Where
PyTorch could not allocate, the figures of its message come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Final, TypeVar

from highwater.accounting.components import COMPONENT_NAMES, account
from highwater.accounting.points import MemoryPoint
from highwater.diagnose.advice import for_given_pool
from highwater.diagnose.case import Case, RankCase, change
from highwater.diagnose.evidence import Evidence, IncidentKind, RankEvidence
from highwater.diagnose.finding import Finding, possible, weightiest_first
from highwater.diagnose.log.failed_allocation import FailedAllocation
from highwater.diagnose.log.last_words import QuotedException
from highwater.diagnose.log.messages import KNOWN, LogMessage
from highwater.diagnose.log.story import NO_LOG, LogStory, unheard
from highwater.diagnose.rules.book import Failed, judged
from highwater.diagnose.rules.device import is_acquitted
from highwater.diagnose.rules.words import names_memory
from highwater.readings.rank import Components, Device, RankReading, TorchMemory, WorkerMemory
from highwater.text.printable import cleaned, plain

_Parts = TypeVar("_Parts", Components, TorchMemory)
MAX_STACK, MAX_ENTRIES = 16, 20
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
_PART: Final = {known.name: known.part for known in KNOWN}
# What these advise follows from readings; the figures of a failed allocation are newer, and say what helps.
_BY_READINGS: Final = frozenset({"ooms", "alloc_retries", "device_full", "over_budget", "unused_reserve"})
# What these advise holds until figures advise better; a start's refusals have advice of their own.
_BY_FIGURES: Final = frozenset(known.name for known in KNOWN if known.of_memory == "device" and not known.at_start)
_REFUSED: Final = "the engine refused to start: "
# Of an exception, in a summary.
_MAX_QUOTE: Final = 300


def diagnose(evidence: Evidence, log: LogStory = NO_LOG, failed: Failed | None = None) -> tuple[Finding, ...]:
    """Return the findings, the weightiest first; advice that this engine cannot follow is left out.

    The engine's log may show a shortage that no number shows.
    """
    found = judged(case_of(evidence, log), failed)
    if _had_room(evidence, found, log):
        found = [replace(one, weight="note") if one.name in _OF_MEMORY_IN_USE else one for one in found]
    if any(one.name == "failed_allocation" for one in found):
        found = [replace(one, advice=()) if one.name in _BY_READINGS else one for one in found]
    return tuple(possible(finding, evidence.engine) for finding in weightiest_first(found))


def advised(log: LogStory, findings: Sequence[Finding], *, is_pool_given: bool = False) -> tuple[LogMessage, ...]:
    """Return the log's messages, without advice that the figures of one, a cause beside it, or a flag make void."""
    has_figures = any(finding.name == "failed_allocation" for finding in findings)
    has_cause = _cause(log) is not None
    return tuple(
        replace(message, advice=())
        if (has_figures and message.name in _BY_FIGURES) or (has_cause and _part(message) in {"end", "wait"})
        else replace(message, advice=for_given_pool(message.advice) if is_pool_given else message.advice)
        for message in log.messages
    )


def summarize(evidence: Evidence, findings: Sequence[Finding], log: LogStory) -> str:
    """Return what happened, what the log says of it, what is known to be fine, and what the numbers say.

    A second sentence has what the sidecar saw. A clue is part of the first only where nothing else is known, and never
    one about memory that was not short.
    """
    cause, has_figures = _cause(log), any(one.name == "failed_allocation" for one in findings)
    repeated = {"device_full"} if has_figures else set()
    likely = [one.title for one in findings if one.weight == "likely" and one.name not in repeated]
    said = cause or next((message for message in log.messages if _part(message) != "event"), None)
    raised, is_known = log.exception, cause is not None or bool(likely)
    parts = []
    if cause is None and raised is not None and (said is None or not raised.follows):
        parts.append(exception_title(raised) + (f': "{plain(raised.text, _MAX_QUOTE)}"' if raised.text else ""))
    if said is not None:
        parts.append(f"the log says that {said.title.removeprefix(_REFUSED)}")
    parts += likely[:2]
    parts += [finding.title for finding in findings if finding.name == "ended_by_signal" and finding.weight != "likely"]
    if _had_room(evidence, findings, log):
        room = next(finding.title for finding in findings if finding.name == "device_had_room")
        parts += [f"device memory was not short ({room})"] if is_acquitted(case_of(evidence, log)) else [room]
        is_outside = any(finding.name == "hang_ended" and finding.weight == "likely" for finding in findings)
        parts += [finding.title for finding in findings if finding.name == "kill_not_known" and not is_outside]
    elif not is_known and (raised is None or raised.follows):
        parts += [finding.title for finding in findings if finding.weight == "clue"][:1]
    if evidence.kind == "start_failed" and evidence.reason and said is None and raised is None:
        # Of processes that left no rank the reason has all figures.
        return f"{_WHAT[evidence.kind]}: {'; '.join([evidence.reason, *(parts if evidence.ranks else ())])}"
    if evidence.kind == "start_failed" and said is None and raised is None and log.was_understood:
        parts.insert(0, "its log ends without an error")
    if not parts:
        parts = ["the cause is not known"]
    if (log.is_cut and not is_known) or (said is None and raised is None and (log.lines > 0 or not likely)):
        parts += [unheard(log)] if unheard(log) else []
    seen = f". What the sidecar saw: {evidence.reason}" if evidence.reason else ""
    return f"{_WHAT[evidence.kind]}: {'; '.join(parts)}{seen}"


def ended_in_order(evidence: Evidence, log: LogStory) -> bool:
    is_killed = evidence.oom_kills is not None and evidence.oom_kills.count > 0
    has_raised = log.exception is not None and not log.exception.before
    has_cause = _cause(log) is not None or has_raised or bool(log.failed)
    is_in_order = log.ended_in_order or evidence.are_closed
    return evidence.kind == "died" and is_in_order and not is_killed and not has_cause


def exception_title(exception: QuotedException) -> str:
    name = exception.process.partition(" pid=")[0] or "a process of the engine"
    name += f" (pid {exception.pid})" if exception.pid is not None else ""
    before = f", {exception.before} before the log's end" if exception.before else ""
    if not exception.text:
        return f"{name} hit an exception that the log does not show{before}"
    return f"an exception of {name}{before}" if before else f"the last exception of {name}"


def _part(message: LogMessage) -> str:
    return _PART.get(message.name, "cause")


def _cause(log: LogStory) -> LogMessage | None:
    return next((message for message in log.messages if _part(message) == "cause"), None)


def _had_room(evidence: Evidence, findings: Sequence[Finding], log: LogStory) -> bool:
    is_short, names = evidence.kind == "out_of_memory" or names_memory(log), {finding.name for finding in findings}
    return not is_short and not log.failed and "device_had_room" in names and names.isdisjoint(_OF_SHORTAGE)


# --- the evidence ---


def case_of(evidence: Evidence, log: LogStory = NO_LOG) -> Case:
    ranks = tuple(_rank_case(evidence, rank, _its_own(rank, evidence, log.failed)) for rank in evidence.ranks)
    since_ready = any(rank.first is not None for rank in ranks)
    grown = _growth(evidence, ranks, since_ready=since_ready)
    growth, whole = evidence.growth, evidence.growth.since_ready_bytes
    return Case(
        kind=evidence.kind,
        ranks=ranks,
        at=evidence.at,
        engine=evidence.engine,
        load=evidence.engine,
        grown_bytes=whole if whole is not None else sum(grown.values()) if grown else None,
        grown=grown,
        since="since the engine was ready" if since_ready or whole is not None else "over the minutes that were kept",
        bytes_per_second=growth.bytes_per_second,
        seconds_to_full=growth.seconds_to_full,
        series=growth.series,
        evidence=evidence,
        log=log,
    )


def _rank_case(evidence: Evidence, rank: RankEvidence, failed: FailedAllocation | None) -> RankCase:
    first, now = _baseline_of(evidence, rank), latest(rank)
    if failed is None:
        return RankCase(now=now, first=first, peak=now, entries=rank.entries)
    now = failed.reading(now, evidence.at)
    return RankCase(now=now, first=first, peak=now, entries=rank.entries, failed_allocation_bytes=failed.tried_bytes)


def _its_own(rank: RankEvidence, evidence: Evidence, failed: Sequence[FailedAllocation]) -> FailedAllocation | None:
    """Return the failure that this rank's allocator alone can have written; ``None`` of an engine that only hangs.

    What a process that is no rank's wrote, such as EngineCore, is quoted from a rank.
    """
    pids = {one.pid for one in evidence.ranks}
    for found in failed if evidence.kind != "hung" else ():
        each = found if found.pid in pids else replace(found, pid=None)
        possible_ranks = [
            one
            for one in evidence.ranks
            if each.may_be_of(one.pid, None if one.reading is None else one.reading.total_bytes)
        ]
        if possible_ranks == [rank]:
            return each
    return None


def latest(evidence: RankEvidence) -> RankReading:
    reading = evidence.reading
    if reading is None:
        nothing = WorkerMemory(
            rank=evidence.rank, dp_rank=evidence.dp_rank, pid=evidence.pid, taken_at=0.0, device=Device()
        )
        reading = account(nothing)
    if not evidence.series or evidence.series[-1].at <= reading.taken_at:
        return reading
    last = evidence.series[-1]
    free = reading.free_bytes
    if free is not None and reading.used_bytes is not None and last.used_bytes is not None:
        free = max(free - (last.used_bytes - reading.used_bytes), 0)
    return replace(
        reading,
        taken_at=last.at,
        used_bytes=last.used_bytes,
        free_bytes=free,
        components=_filled(last.components, reading.components),
        torch=_filled(last.torch, reading.torch),
    )


def known_points(evidence: RankEvidence) -> tuple[MemoryPoint, ...]:
    if evidence.reading is None:
        return evidence.series
    return tuple(sorted((*evidence.series, MemoryPoint.of(evidence.reading)), key=lambda known: known.at))


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


def _baseline_of(evidence: Evidence, rank: RankEvidence) -> RankReading | None:
    same = (first for first in evidence.baseline if first.key == rank.key)
    return next((first for first in same if rank.pid is None or first.pid in (None, rank.pid)), None)


def _growth(evidence: Evidence, ranks: tuple[RankCase, ...], *, since_ready: bool) -> Mapping[str, int]:
    grown: dict[str, int] = {}
    for known, rank in zip(evidence.ranks, ranks, strict=True):
        points = known_points(known)
        if not points or (since_ready and rank.first is None):
            continue
        begun = rank.first or replace(rank.now, components=points[0].components)
        for name in COMPONENT_NAMES:
            if (moved := change(replace(begun, pid=rank.now.pid), rank.now, name)) is not None:
                grown[name] = grown.get(name, 0) + moved
    return {name: grown[name] for name in COMPONENT_NAMES if name in grown}


def _filled(newer: _Parts, older: _Parts) -> _Parts:
    """Take from the older what the newer lacks: a series need not keep all that a reading has."""
    missing = {part.name: getattr(older, part.name) for part in fields(newer) if getattr(newer, part.name) is None}
    return replace(newer, **missing)
