"""Opens incidents, counts their repetitions, and closes them when the engine is ready again.

A storm of failures is one incident: what is reported again within a minute is counted there, and a start that fails the
same way again within an hour. A hang that the engine's death ends becomes that death. The evidence of
the first report stays, since it is nearest to the cause; later log lines are added: processes that end write their last
lines a moment after they were missed. All reading and writing is done in a thread, because the data plane must not wait
for a disk.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, get_args

from highwater.diagnose.evidence import Evidence, HangBefore, Headline, Incident, IncidentKind
from highwater.diagnose.finding import Finding
from highwater.diagnose.incidents.diagnosis import concluded, ended_in_order, joined
from highwater.diagnose.incidents.store import IncidentStore, UnreadableIncident
from highwater.diagnose.log.messages import merged
from highwater.diagnose.log.reader import LogPosition
from highwater.diagnose.log.record import NEAR_SECONDS
from highwater.diagnose.log.starts import EngineLog, FailedStart
from highwater.diagnose.log.story import NO_LOG, LogStory
from highwater.model.report import OpenIncident
from highwater.process.clocks import SYSTEM, Clocks

STORM_SECONDS = 60.0
# Starts that fail the same way: a supervisor's pauses between them grow to minutes.
SAME_START_SECONDS = 3600.0
# When the log is read once more. vLLM logs that a process waits without a response a minute after it began to.
LATE_SECONDS: Final[Mapping[IncidentKind, tuple[float, ...]]] = {
    "died": (5.0,),
    "hung": (5.0, 75.0),
    "out_of_memory": (5.0,),
}
# The shortest time between two writes of a storm; the count in between is kept in memory.
WRITE_SECONDS = 5.0
MAX_TRACKED = 64

# Running out of memory need not end the engine: being ready then ends no storm of it.
_OUTLIVES_READY: Final = "out_of_memory"
_NO_LOG: Final = (
    "engine_log is not set, so nothing is known of what the engine itself said: set it (HIGHWATER_ENGINE_LOG) to the "
    "file that vLLM's output goes to, and the next one can name the cause"
)
_NUMBERED: Final = re.compile(r"[^\s'\"]{0,200}\d[^\s'\"]{0,200}")
_WHY_IT_HUNG: Final = frozenset({"stopped_ranks", "lost_ranks", "long_step"})
_Result = TypeVar("_Result")

log = logging.getLogger("highwater.diagnose.incidents")


class _LateRead(NamedTuple):
    """An incident whose log, from ``since`` on, is to be read once more at ``due``, in monotonic seconds.

    ``until`` is where the log ended when the incident did: what came later is of another one. A position needs neither
    the time zone nor the year, which the times in the log's lines lack.
    """

    id: str
    due: float
    evidence: Evidence
    since: LogPosition | None
    until: LogPosition | None = None


class Incidents:
    """The incidents; ``internal_error`` counts an internal error."""

    def __init__(
        self,
        store: IncidentStore,
        *,
        engine_log: Path | None = None,
        clocks: Clocks = SYSTEM,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        store.prepare()
        self._log = EngineLog(engine_log) if engine_log is not None else None
        self._clocks = clocks
        self._internal_error = internal_error
        self._late: tuple[_LateRead, ...] = ()
        left = [headline for headline in store.headlines() if headline.problem is None]
        self._numbers = _numbers(left)
        self._counts: Mapping[IncidentKind, int] = self._numbers
        self._lock = asyncio.Lock()
        # All that are open, and of each kind the last one; at first those that an earlier sidecar left. Never changed
        # in place: the event loop reads it while a thread works.
        self._tracked = _worth_tracking({headline.id: headline for headline in left})
        self._findings: Mapping[str, tuple[Finding, ...]] = {}
        self._written_at: dict[str, float] = {}

    @property
    def folder(self) -> Path | None:
        return self._store.folder

    @property
    def problem(self) -> str | None:
        return self._store.problem

    @property
    def has_log(self) -> bool:
        return self._log is not None

    @property
    def log_problem(self) -> str | None:
        """Why the engine's log cannot be read now, by a look at the disk: it may come later."""
        return None if self._log is None else self._log.problem

    @property
    def counts(self) -> Mapping[IncidentKind, int]:
        """The number of incidents of each kind, by the folder, without those that may be withdrawn: it never falls."""
        return self._counts

    @property
    def is_one_open(self) -> bool:
        return bool(_unended(self._tracked))

    @property
    def last_open(self) -> OpenIncident | None:
        last = max(_unended(self._tracked), key=lambda one: one.last_at or 0.0, default=None)
        if last is None:
            return None
        return OpenIncident(
            id=last.id, kind=last.kind or "", at=last.at or 0.0, summary=last.summary, memory=last.memory
        )

    @property
    def open_findings(self) -> tuple[Finding, ...]:
        """Those of open incidents, the last one's first, each name once; of incidents that this sidecar has opened."""
        ids = sorted((one.id for one in _unended(self._tracked)), reverse=True)
        found = [finding for name in ids for finding in self._findings.get(name, ())]
        return tuple({finding.name: finding for finding in reversed(found)}.values())[::-1]

    @property
    def is_late_due(self) -> bool:
        return any(late.due <= self._clocks.monotonic() for late in self._late)

    async def complete(
        self, *, at_once: bool = False, again: Callable[[Evidence], Evidence] = lambda known: known
    ) -> tuple[Headline, ...]:
        """Read the log once more for incidents for which that is due, or ``at_once`` for all, and write them.

        ``again`` completes the evidence with what was counted or written late. Those are returned that were none,
        since the engine had ended in order: they are withdrawn.
        """
        return await self._in_thread(partial(self._complete, at_once=at_once, again=again))

    async def begin_life(self) -> None:
        """Note that another life of the engine is ready: earlier lines of its log are not of this life."""
        if self._log is not None:
            await self._in_thread(self._log.begin_life)

    async def heard(self) -> LogStory:
        if self._log is None:
            return NO_LOG
        return await self._in_thread(partial(self._log.heard, self._clocks.monotonic()))

    async def failed_starts(self, *, at_once: bool = False) -> tuple[FailedStart, ...]:
        """Return the starts that failed, by the engine's log; to be called while no engine responds.

        With ``at_once`` a start's last lines are not awaited: the sidecar ends.
        """
        if self._log is None:
            return ()
        return await self._in_thread(partial(self._log.look, self._clocks.monotonic(), at_once=at_once))

    async def open_incident(self, evidence: Evidence) -> tuple[Headline, bool] | None:
        """Open an incident, or count a repetition; return it, and whether it is new.

        ``None``: by its log the engine ended in order: no incident. Never raises for what is in the evidence, on
        the disk or in the log.
        """
        return await self._in_thread(partial(self._open, evidence))

    async def close_all(self) -> tuple[Headline, ...]:
        return await self._in_thread(self._close) if self.is_one_open else ()

    async def headlines(self) -> list[Headline]:
        listed = await asyncio.to_thread(self._store.headlines)
        # With what was counted since the last write.
        return [one if one.problem else self._tracked.get(one.id, one) for one in listed]

    async def read(self, incident_id: str) -> Incident | None:
        """Raises UnreadableIncident: it exists, and this version cannot read it."""
        incident = await asyncio.to_thread(self._store.read, incident_id)
        counted = self._tracked.get(incident_id)
        return incident if incident is None or counted is None else _counted(incident, counted)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        async with self._lock:
            return await asyncio.to_thread(call)

    # --- in a thread ---

    def _open(self, evidence: Evidence) -> tuple[Headline, bool] | None:
        since = self._log.since if self._log is not None else None
        story = self._story(evidence, since)
        if ended_in_order(evidence, story) and not self._is_hang_open():
            return None
        same = [headline for headline in self._tracked.values() if headline.kind == evidence.kind]
        last = max(same, key=lambda headline: headline.last_at or 0.0, default=None)
        if evidence.start is not None:
            if (known := self._same_start(evidence.start, evidence, same)) is not None:
                return known, False
        elif last is not None and (
            abs(evidence.at - (last.last_at or 0.0)) < STORM_SECONDS  # also with a clock that was set back
            and (last.ended_at is None or evidence.kind == _OUTLIVES_READY)
        ):
            counted = self._repeated(replace(last, ended_at=None), evidence)
            self._late = tuple(one._replace(until=None) if one.id == counted.id else one for one in self._late)
            if evidence.at - self._written_at.get(counted.id, 0.0) >= WRITE_SECONDS:
                self._rewrite(counted, evidence.at)
            return counted, False
        hang = self._hang_before(evidence)
        if hang is not None:
            evidence = _ending(hang, evidence)
            self._late = tuple(one for one in self._late if one.id != hang.id)
        incident = self._incident(evidence, story)
        if hang is not None:
            # A link to the hang shows how it ended. It is counted, as what it began as.
            incident = replace(incident, id=hang.id, number=hang.number)
        else:
            incident = replace(incident, number=self._numbers[evidence.kind] + 1)
            self._numbers = {**self._numbers, evidence.kind: incident.number}
        self._store.write(incident)
        self._track(incident.headline, incident.findings)
        self._written_at = {incident.id: evidence.at}
        now, seconds = self._clocks.monotonic(), LATE_SECONDS.get(evidence.kind, ())
        self._late += tuple(_LateRead(incident.id, now + late, evidence, since) for late in seconds)
        self._count()
        return incident.headline, True

    def _same_start(self, start: FailedStart, evidence: Evidence, same: Sequence[Headline]) -> Headline | None:
        """Return the open incident of a start that fails the same way, counted once more; of an earlier sidecar too."""
        for stored in filter(None, [self._stored(headline.id) for headline in same]):
            headline = self._tracked[stored.id]
            if stored.start == start.id:
                return headline
            is_soon = evidence.at - (headline.last_at or 0.0) < SAME_START_SECONDS
            if headline.ended_at is None and is_soon and _cause(stored) == _cause(start.story):
                counted = self._repeated(headline, evidence)
                self._store.write(replace(_counted(stored, counted), start=start.id))
                return counted
        return None

    def _count(self) -> None:
        # A death may prove an orderly end; not that of a hang, nor one with a kill that was counted.
        deaths = {one.id: one.evidence for one in self._late if one.evidence.kind == "died"}
        pending = sum(one.hang is None and not (one.oom_kills and one.oom_kills.count) for one in deaths.values())
        self._counts = {**self._numbers, "died": self._numbers["died"] - pending}

    def _hang_before(self, evidence: Evidence) -> Incident | None:
        """Return the hang that this death ends: it is open, so the engine has not been ready since.

        A killed worker stops every step, and then the API server ends. A liveness probe ends an engine that hangs.
        """
        if evidence.kind != "died":
            return None
        hangs = [one for one in self._tracked.values() if one.kind == "hung" and one.ended_at is None]
        before = [one for one in hangs if (one.at or 0.0) <= evidence.at]
        return self._stored(max(before, key=lambda one: one.at or 0.0).id) if before else None

    def _complete(self, *, at_once: bool, again: Callable[[Evidence], Evidence]) -> tuple[Headline, ...]:
        now, late = self._clocks.monotonic(), self._late
        due = [one for one in late if at_once or one.due <= now]
        self._late = tuple(one for one in late if one not in due)
        withdrawn = []
        for one in due:
            stored = self._stored(one.id)
            if stored is None:
                continue  # it was the oldest, and was removed
            story, evidence = self._story(one.evidence, one.since, one.until), again(one.evidence)
            # A death that a hang came before was its end, in whatever order.
            if ended_in_order(evidence, story) and stored.first_kind != "hung" and not self._is_hang_open():
                withdrawn.append(self._withdrawn(stored))
                continue
            incident = self._incident(evidence, story)
            if stored.messages and not incident.messages:  # rotated since
                incident = replace(incident, messages=stored.messages, exception=stored.exception)
            if _says_more(incident, stored, story):
                tracked = self._tracked.get(one.id, stored.headline)
                incident = replace(incident, id=stored.id, number=stored.number)
                self._store.write(_counted(incident, tracked))
                known = replace(tracked, summary=incident.summary, memory=incident.memory)
                self._track(known, incident.findings)
        self._count()
        return tuple(withdrawn)

    def _withdrawn(self, stored: Incident) -> Headline:
        """Take an incident back: the log's last lines came late, and tell of an orderly end."""
        self._store.remove(stored.id)
        self._late = tuple(one for one in self._late if one.id != stored.id)
        self._tracked = {name: one for name, one in self._tracked.items() if name != stored.id}
        if stored.kind is not None:
            self._numbers = {**self._numbers, stored.kind: self._numbers[stored.kind] - 1}
        return stored.headline

    def _is_hang_open(self) -> bool:
        return any(one.kind == "hung" for one in _unended(self._tracked))

    def _stored(self, incident_id: str) -> Incident | None:
        try:
            return self._store.read(incident_id)
        except UnreadableIncident:
            return None

    def _repeated(self, last: Headline, evidence: Evidence) -> Headline:
        counted = replace(last, count=last.count + 1, last_at=max(evidence.at, last.last_at or 0.0))
        self._track(counted)
        return counted

    def _close(self) -> tuple[Headline, ...]:
        now = self._clocks.wall()
        ended = tuple(replace(headline, ended_at=now) for headline in _unended(self._tracked))
        if self._log is not None:
            ids, end = {headline.id for headline in ended}, self._log.end()
            self._late = tuple(one._replace(until=end) if one.id in ids else one for one in self._late)
        for headline in ended:
            self._track(headline)
            self._rewrite(headline, now)
        return ended

    def _track(self, headline: Headline, findings: tuple[Finding, ...] | None = None) -> None:
        self._tracked = _worth_tracking({**self._tracked, headline.id: headline})
        if findings is not None:
            known = {**self._findings, headline.id: findings}
            self._findings = {name: found for name, found in known.items() if name in self._tracked}

    def _rewrite(self, counted: Headline, now: float) -> None:
        self._written_at = {counted.id: now}
        incident = self._stored(counted.id)
        if incident is None:
            return
        if counted.ended_at is None and self._log is not None:  # afterwards the log may be the next engine's
            story = self._log.story(self._log.since)
            incident = replace(incident, messages=merged(incident.messages, story.messages))
        self._store.write(_counted(incident, counted))

    def _incident(self, evidence: Evidence, story: LogStory) -> Incident:
        stamp = datetime.fromtimestamp(evidence.at, UTC).strftime("%Y%m%dT%H%M%SZ")
        first = f"{stamp}-{evidence.kind.replace('_', '-')}"
        ids = (first if number == 1 else f"{first}-{number}" for number in count(1))
        return concluded(evidence, story, next(each for each in ids if not self._store.has(each)), self._internal_error)

    def _story(self, evidence: Evidence, since: LogPosition | None, until: LogPosition | None = None) -> LogStory:
        if self._log is None:
            return LogStory(problem=_NO_LOG)
        if evidence.start is not None:
            return evidence.start.story
        hangs = [evidence.at - (one.at or evidence.at) for one in _unended(self._tracked) if one.kind == "hung"]
        still = evidence.still_seconds + max([0.0 if evidence.hang is None else evidence.hang.seconds, *hangs])
        return self._log.story(since, until, within=NEAR_SECONDS + still + LATE_SECONDS[evidence.kind][-1])


def _numbers(headlines: list[Headline]) -> dict[IncidentKind, int]:
    """Return the number of incidents of each kind: the newest one's number includes those that were removed."""
    counts: dict[IncidentKind, int] = {}
    for kind in get_args(IncidentKind):
        numbers = [one.number for one in headlines if ("hung" if one.first_kind == "hung" else one.kind) == kind]
        counts[kind] = max([*numbers, len(numbers)])
    return counts


def _says_more(incident: Incident, stored: Incident, story: LogStory) -> bool:
    """Return whether the log, read once more, or a kill that was counted late changes an incident.

    A log that was rotated since has nothing of it: what is known stays.
    """
    if any(found.name == "killed_by_kernel" for found in incident.findings) and incident.findings != stored.findings:
        return True
    is_silent = not incident.messages and incident.exception is None
    if is_silent and (stored.exception or not (story.was_understood or story.is_cut)):
        return False
    told = (incident.messages, incident.exception, incident.summary)
    return told != (stored.messages, stored.exception, stored.summary)


def _ending(hang: Incident, evidence: Evidence) -> Evidence:
    """Return a death's evidence with that of the hang that it ended, which is nearer to the cause."""
    why = [found for found in hang.findings if found.name in _WHY_IT_HUNG]
    reasons, seconds = (hang.reason, evidence.reason), evidence.at - (hang.at or evidence.at)
    return replace(
        evidence,
        ranks=joined(evidence.ranks, hang.ranks),
        hang=HangBefore(seconds=seconds + hang.still_seconds, open_seconds=seconds, findings=tuple(why)),
        reason="; then: ".join(dict.fromkeys(reason for reason in reasons if reason)),
    )


def _cause(told: Incident | LogStory) -> str:
    """Return what the log says of it: a known cause, else the exception without numbers, which differ each time."""
    first = next(iter(told.messages), None)
    name = "" if first is None else first.name
    if told.exception is None or (first is not None and first.part == "cause"):
        return name
    return f"{name} {_NUMBERED.sub('', told.exception.text)}"


def _unended(tracked: Mapping[str, Headline]) -> list[Headline]:
    return [headline for headline in tracked.values() if headline.ended_at is None]


def _worth_tracking(headlines: Mapping[str, Headline]) -> dict[str, Headline]:
    in_order = [headlines[name] for name in sorted(headlines)]
    last = {headline.kind: headline for headline in in_order}
    worth = [headline for headline in in_order if headline.ended_at is None or last[headline.kind] is headline]
    return {headline.id: headline for headline in worth[-MAX_TRACKED:]}


def _counted(incident: Incident, headline: Headline) -> Incident:
    return replace(incident, count=headline.count, last_at=headline.last_at, ended_at=headline.ended_at)
