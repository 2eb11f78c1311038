"""Opens incidents, counts their repetitions, and closes them when the engine is ready again.

A storm of failures makes one incident: what is reported again within a minute is counted there. The evidence of the
first report stays, since it is nearest to the cause; what the engine's log says later is added. All reading and writing
is done in a thread, because the data plane must not wait for a disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from app import __version__
from app.incidents.diagnosis import diagnose, summarize
from app.incidents.enginelog import match, merged, read_tail
from app.incidents.incident import (
    EngineSeen,
    Evidence,
    Happened,
    Headline,
    Incident,
    IncidentKind,
    RankEvidence,
)
from app.incidents.plain import cleaned
from app.incidents.store import IncidentStore, Unreadable
from app.readings import Event, PolicyStatus

STORM_SECONDS = 60.0
# A storm is written down so often at most; the count in between is kept in memory.
WRITE_SECONDS = 5.0
TRACKED_MOST = 64
EVENTS_MOST, DECISIONS_MOST = 200, 20
STACK_MOST, ENTRIES_MOST = 16, 20

# Running out of memory need not end the engine: being ready then ends no storm of it.
_OUTLIVES_READY: Final = "out_of_memory"
_POLICY: Final = TypeAdapter(PolicyStatus)

log = logging.getLogger("highwater.incidents")


class Incidents:
    """The incidents.

    Args:
        store: Where they are kept.
        engine_log: The engine's log, where there is one to read.
        clock: Unix seconds.
    """

    def __init__(
        self, store: IncidentStore, *, engine_log: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        store.prepare()
        self._engine_log = engine_log
        self._clock = clock
        self._turn = asyncio.Lock()
        # All that are open, and of each kind the last one; None until the store was looked into. Never changed in
        # place: the event loop looks at it while a thread works.
        self._tracked: dict[str, Headline] | None = None
        self._written_at: dict[str, float] = {}

    @property
    def folder(self) -> Path | None:
        """Where they are; ``None`` where they are in memory only."""
        return self._store.folder

    @property
    def problem(self) -> str | None:
        """Why the last one could not be written, in one sentence; ``None`` if it could."""
        return self._store.problem

    async def open_incident(self, evidence: Evidence) -> tuple[Headline, bool]:
        """Something happened. Never raises for what is in the evidence, on the disk or in the log.

        Returns:
            The incident, and whether it is a new one: ``False`` where one that is under way was counted on.
        """
        async with self._turn:
            return await asyncio.to_thread(self._open, evidence)

    async def engine_ready(self) -> tuple[Headline, ...]:
        """The engine is ready: what is open ends. Costs nothing where nothing is open.

        Returns:
            Those that ended.
        """
        if self._tracked is not None and not _unended(self._tracked):
            return ()
        async with self._turn:
            return await asyncio.to_thread(self._close)

    async def headlines(self) -> list[Headline]:
        """All of them, newest first; one that cannot be read says why."""
        listed = await asyncio.to_thread(self._store.headlines)
        # What was counted since it was written last.
        counted = self._tracked or {}
        return [headline if headline.problem else counted.get(headline.id, headline) for headline in listed]

    async def read(self, incident_id: str) -> Incident | None:
        """The incident, ``None`` where there is none.

        Raises:
            Unreadable: It is there, and is none that this version reads.
        """
        incident = await asyncio.to_thread(self._store.read, incident_id)
        counted = (self._tracked or {}).get(incident_id)
        return incident if incident is None or counted is None else _counted(incident, counted)

    # --- in a thread ---

    def _open(self, evidence: Evidence) -> tuple[Headline, bool]:
        same = [headline for headline in self._adopted().values() if headline.kind == evidence.kind]
        last = max(same, key=lambda headline: headline.last_at or 0.0, default=None)
        if last is not None and self._goes_on(last, evidence):
            return self._repeat(last, evidence), False
        incident = self._incident(evidence)
        self._store.write(incident)
        self._track(incident.headline)
        self._written_at = {incident.id: incident.last_at}
        return incident.headline, True

    def _goes_on(self, last: Headline, evidence: Evidence) -> bool:
        is_recent = evidence.at - (last.last_at or 0.0) < STORM_SECONDS
        return is_recent and (last.ended_at is None or evidence.kind == _OUTLIVES_READY)

    def _repeat(self, last: Headline, evidence: Evidence) -> Headline:
        counted = replace(last, count=last.count + 1, last_at=max(evidence.at, last.last_at or 0.0), ended_at=None)
        self._track(counted)
        if evidence.at - self._written_at.get(counted.id, 0.0) >= WRITE_SECONDS:
            self._rewrite(counted, evidence.at)
        return counted

    def _close(self) -> tuple[Headline, ...]:
        now = self._clock()
        ended = tuple(replace(headline, ended_at=now) for headline in _unended(self._adopted()))
        for headline in ended:
            self._track(headline)
            self._rewrite(headline, now)
        return ended

    def _adopted(self) -> dict[str, Headline]:
        """What is tracked; at first what an earlier sidecar left."""
        if self._tracked is None:
            left = [headline for headline in self._store.headlines() if headline.problem is None]
            self._tracked = _worth_tracking({headline.id: headline for headline in left})
        return self._tracked

    def _track(self, headline: Headline) -> None:
        self._tracked = _worth_tracking({**self._adopted(), headline.id: headline})

    def _rewrite(self, counted: Headline, now: float) -> None:
        """Write the count down, and what the log says since. Where the incident is gone, nothing is left to write."""
        self._written_at = {counted.id: now}
        try:
            incident = self._store.read(counted.id)
        except Unreadable:
            return
        if incident is None:
            return
        if counted.ended_at is None:  # afterwards the log may be the next engine's
            incident = replace(incident, messages=merged(incident.messages, match(self._log()[0])))
        self._store.write(_counted(incident, counted))

    def _incident(self, evidence: Evidence) -> Incident:
        lines, problem = self._log()
        notes = [problem] if problem else []
        messages = match(lines)
        evidence = _harmless(evidence)
        try:
            findings = diagnose(evidence)
        except Exception:
            # Broad, because the evidence is worth more than what is made of it: it comes from a dying engine, and
            # nobody can collect it again.
            log.exception("the evidence of an incident could not be diagnosed kind=%s", evidence.kind)
            findings = ()
            notes.append("the numbers could not be diagnosed; the sidecar's log says why")
        return Incident(
            id=self._id(evidence.kind, evidence.at),
            kind=evidence.kind,
            at=evidence.at,
            last_at=evidence.at,
            summary=summarize(evidence, findings, messages),
            engine=_engine(evidence),
            reason=evidence.reason,
            findings=findings,
            messages=messages,
            ranks=evidence.ranks,
            growth=evidence.growth,
            events=_short(evidence.events, EVENTS_MOST),
            policy=_policy(evidence.policy),
            decisions=_short(evidence.decisions, DECISIONS_MOST),
            notes=tuple(notes),
            written_by=__version__,
        )

    def _log(self) -> tuple[list[str], str | None]:
        if self._engine_log is None:
            return [], "engine_log is not set, so nothing is known of what the engine itself said"
        return read_tail(self._engine_log)

    def _id(self, kind: IncidentKind, at: float) -> str:
        stamp = datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")
        first = made = f"{stamp}-{kind.replace('_', '-')}"
        number = 1
        while self._store.has(made):
            number += 1
            made = f"{first}-{number}"
        return made


def _unended(tracked: Mapping[str, Headline]) -> list[Headline]:
    return [headline for headline in tracked.values() if headline.ended_at is None]


def _worth_tracking(headlines: Mapping[str, Headline]) -> dict[str, Headline]:
    """Those that are open, and the last of each kind; the newest of too many."""
    in_order = [headlines[name] for name in sorted(headlines)]
    last = {headline.kind: headline for headline in in_order}
    worth = [headline for headline in in_order if headline.ended_at is None or last[headline.kind] is headline]
    return {headline.id: headline for headline in worth[-TRACKED_MOST:]}


def _counted(incident: Incident, headline: Headline) -> Incident:
    return replace(
        incident,
        count=headline.count,
        last_at=headline.last_at if headline.last_at is not None else incident.last_at,
        ended_at=headline.ended_at,
    )


def _harmless(evidence: Evidence) -> Evidence:
    """Every text in it as one plain line, every list bounded. A series has no texts, and many points."""
    bare = replace(evidence, ranks=tuple(replace(rank, series=()) for rank in evidence.ranks))
    clean = cleaned(bare)
    ranks = tuple(_bounded(rank, was) for rank, was in zip(clean.ranks, evidence.ranks, strict=True))
    return replace(clean, ranks=ranks)


def _bounded(rank: RankEvidence, was: RankEvidence) -> RankEvidence:
    return replace(rank, series=was.series, stack=rank.stack[:STACK_MOST], entries=rank.entries[:ENTRIES_MOST])


def _engine(evidence: Evidence) -> EngineSeen:
    engine, load = evidence.engine, evidence.load
    return EngineSeen(
        url=engine.url,
        state=engine.state,
        version=engine.version,
        model=engine.model,
        hint=engine.hint,
        requests_running=_first(load.requests_running, engine.requests_running),
        requests_waiting=_first(load.requests_waiting, engine.requests_waiting),
        kv_cache_usage_ratio=_first(load.kv_cache_usage_ratio, engine.kv_cache_usage_ratio),
    )


def _first(*values: Any) -> Any:  # noqa: ANN401 - whatever comes in goes out
    return next((value for value in values if value is not None), None)


def _short(events: tuple[Event, ...], most: int) -> tuple[Happened, ...]:
    in_order = sorted(events, key=lambda event: event.at)[-most:]
    return tuple(
        Happened(
            at=event.at,
            kind=event.kind,
            summary=event.summary,
            rule=event.rule,
            trigger=event.trigger,
            caller=event.caller,
        )
        for event in in_order
    )


def _policy(policy: PolicyStatus | None) -> dict[str, Any] | None:
    return _POLICY.dump_python(policy, mode="json") if policy is not None else None
