"""An incident's diagnosis: the rules' findings, weighed against one another and the log, and the summary. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from highwater.diagnose.case import Case, given
from highwater.diagnose.finding import Finding, for_given_pool, weightiest_first
from highwater.diagnose.incident import Evidence, IncidentKind, OomKills, RankEvidence
from highwater.diagnose.log.last_words import QuotedException
from highwater.diagnose.log.messages import KNOWN, LogMessage
from highwater.diagnose.log.story import LogStory, unheard
from highwater.diagnose.rules.book import Failed, judged
from highwater.diagnose.rules.device import is_acquitted
from highwater.diagnose.rules.words import names_memory
from highwater.host.past import OWN_END_SECONDS, SILENT_SECONDS, containers_of_engine
from highwater.host.reading import ContainerMemory, HostReading
from highwater.model.engine import Process
from highwater.model.rank import RankReading
from highwater.process.untrusted import cleaned, plain

# An earlier kill is another matter.
RECENT_SECONDS: Final = 60.0
_BY_CONTAINER: Final = "counted in the engine's container"
_MAX_RISES, _MAX_GROUPS = 64, 256
_Known: TypeAlias = tuple[int, Process | None]  # a counter, and the rank's process that reported it


class _Rise(NamedTuple):
    at: float
    group: str
    kills: OomKills


class OomKillWatch:
    """Notices when a counter rises.

    Attributes:
        total: Kills since this sidecar began; ``None`` before any counter of the engine was read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total: int | None = None
        self._clock = clock
        self._counts: dict[str, _Known] = {}
        self._rises: deque[_Rise] = deque(maxlen=_MAX_RISES)
        self._has_looked = self._is_container_counted = False

    def notice(self, ranks: Iterable[RankReading]) -> None:
        """Compare the counters that the ranks report with their last values. Ranks of one container tell one kill."""
        rises = [0]
        for rank in ranks:
            count, name = rank.host_memory.cgroup_oom_kills, rank.label
            if count is not None:
                process = Process(rank.host, rank.pid, rank.pid_started)
                before, was = self._counts.get(f"rank {name}", (count, process))
                # A newer container than its last one's: pids, and counters, begin again.
                has_moved = was is not None and process != was and process.host == was.host
                is_anew = has_moved and (process.pid or 0) <= (0 if was is None else was.pid or 0)
                where, known = f"counted where rank {name} runs", (count, process)
                rise = self._note(f"rank {name}", where, count if is_anew else before, known)
                rises.append(count if is_anew else rise)
        # Containers tell them too, where processes write files.
        if not self._is_container_counted and len(rises) > 1:
            self.total = (self.total or 0) + max(rises)

    def look(self, reading: HostReading) -> None:
        alive = {one.container for one in reading.processes if one.age_seconds < SILENT_SECONDS}
        # Of one container there may be many looks, which its processes have left: a counter never falls.
        highest: dict[str, tuple[int, ContainerMemory]] = {}
        for one in containers_of_engine(reading):
            count = one.events.get("oom_kill", -1)
            if count > highest.get(one.key, (-1, one))[0]:
                highest[one.key] = count, one
        for key, (count, one) in highest.items():
            # What was counted before this sidecar began is history, unless a container has just ended full.
            is_seen = self._has_looked or one.age_seconds <= RECENT_SECONDS
            has_ended_full = key not in alive and one.is_nearly_full and is_seen
            unseen = 0 if has_ended_full or (self._has_looked and one.is_private) else count
            before, _ = self._counts.get(key, (unseen, None))
            rise = self._note(key, _BY_CONTAINER, before, (count, None), one.age_seconds)
            self.total = (self.total or 0) + rise
        self._has_looked, self._is_container_counted = True, self._is_container_counted or bool(highest)

    def _note(self, group: str, where: str, before: int, known: _Known, age_seconds: float = 0.0) -> int:
        rise = max(0, known[0] - before)
        if rise:
            self._rises.append(_Rise(self._clock() - age_seconds, group, OomKills(count=rise, where=where)))
        self._counts.pop(group, None)
        self._counts[group] = known  # the last one that was seen stands last
        if len(self._counts) > _MAX_GROUPS:
            del self._counts[next(iter(self._counts))]
        return rise

    def recent(self, reading: HostReading | None = None, alive: Iterable[RankReading] = ()) -> OomKills | None:
        """Return the kills of the last minute; ``None`` where no counter was read after the engine's end.

        ``reading`` was made after the end; ``alive`` are the ranks that have outlived it, and report their counters.
        """
        recent: dict[str, OomKills] = {}
        for at, group, kills in self._rises:
            if self._clock() - at <= RECENT_SECONDS:
                count = kills.count + (recent[group].count if group in recent else 0)
                recent[group] = OomKills(count=count, where=kills.where)
        # Several groups report the same kill: those of ranks, and the container's.
        if recent:
            return max(recent.values(), key=lambda kills: kills.count)
        if reading is not None and _is_counted_after_the_end(reading):
            return OomKills(count=0, where=_BY_CONTAINER)
        outlived = [rank for rank in alive if rank.host_memory.cgroup_oom_kills is not None]
        if not outlived:
            return None
        return OomKills(count=0, where=f"counted where {outlived[0].name} runs")


def _is_counted_after_the_end(reading: HostReading) -> bool:
    """Return whether a counter was read later than the last sign of the process that the engine's end began with.

    A process that was stopped, or helped the start, was silent long before; an older container is another life's.
    """
    everyone = (*reading.processes, *reading.ended)
    newest = max(everyone, key=lambda one: one.started or 0, default=None)
    ages = [one.age_seconds for one in everyone if newest is not None and one.container == newest.container]
    first = max((age for age in ages if age <= min(ages) + OWN_END_SECONDS), default=0.0)
    return any(
        "oom_kill" in one.events and (one.sees == "sidecar" or first >= one.age_seconds + SILENT_SECONDS)
        for one in containers_of_engine(reading)
        if newest is not None and one.key == newest.container
    )


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
    log = case.log
    has_figures = any(finding.name == "failed_allocation" for finding in findings)
    has_cause = _cause(log) is not None
    return tuple(
        replace(message, advice=())
        if (has_figures and message.name in _BY_FIGURES) or (has_cause and _part(message) in {"end", "wait"})
        else replace(message, advice=for_given_pool(message.advice) if case.is_pool_given else message.advice)
        for message in log.messages
    )


def summarize(case: Case, findings: Sequence[Finding]) -> str:
    """Return what happened, what the log says of it, what is known to be fine, and what the numbers say.

    A second sentence has what the sidecar saw. A clue is part of the first only where nothing else is known, and never
    one about memory that was not short.
    """
    evidence, log = given(case.evidence), case.log
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
    if _had_room(case, findings):
        room = next(finding.title for finding in findings if finding.name == "device_had_room")
        parts += [f"device memory was not short ({room})"] if is_acquitted(case) else [room]
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


def _had_room(case: Case, findings: Sequence[Finding]) -> bool:
    is_short, names = case.kind == "out_of_memory" or names_memory(case.log), {finding.name for finding in findings}
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
