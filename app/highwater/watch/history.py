"""The ring of readings, the events, the marks, and the watchers of all three.

Kept in memory only and bounded in every direction. Readings are kept as packed floats: an hour of eight ranks at one
reading a second takes 5 MB, and 70 MB as the reports themselves.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, Final, NamedTuple, TypeAlias

from highwater.model.components import ROW, MemoryPoint
from highwater.model.engine import LOAD_FIGURES, EngineState
from highwater.model.pace import Track
from highwater.model.rank import RankKey, RankReading
from highwater.model.remedies import RemedyResult, used_total
from highwater.model.report import Caller, Event, EventKind, Report, Trigger
from highwater.model.units import gib_text
from highwater.process.clocks import SYSTEM, Clocks

MARKS_KEPT = 100
EVENTS_KEPT = 1000
# Of clients that read the events live without the admin token: in all, and from one address. Those with the token are
# counted apart, so that there is room for an operator.
MAX_WATCHERS = 64
MAX_WATCHERS_PER_PEER = 16
MAX_OPERATORS_WATCHING = 64
WATCHER_BACKLOG = 256
MAX_READINGS = 1000
RELIEFS_KEPT = 8
_ENGINE_ROW: Final = (*LOAD_FIGURES, "requests_ended", "proxy_requests_ended", "host_kept_bytes")
_ONE_RELIEF_SECONDS = 3.0
_INSTANT = 0.01
# What follows is another growth than what was before.
_CUTS: Final[frozenset[EventKind]] = frozenset({"reset", "state", "mark"})

Update: TypeAlias = Report | Event | None  # what a watcher receives; `None` ends it
_Identity: TypeAlias = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Mark:
    name: str
    at: float
    ranks: tuple[RankReading, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    mono: float
    identities: tuple[_Identity, ...]
    times: array[float]  # when each rank's reading was taken, in monotonic seconds
    values: array[float]
    engine: array[float]

    @classmethod
    def of(cls, report: Report, now: float, before: _Sample | None, *beside: int | None) -> _Sample:
        values = array("d", chain.from_iterable(map(_values, report.ranks)))
        identities = tuple(map(_identity, report.ranks))
        figures = (*(getattr(report.engine, name) for name in LOAD_FIGURES), report.engine.work.requests, *beside)
        return cls(
            at=report.taken_at or 0.0,
            mono=now - (report.age_seconds or 0.0),
            # One tuple for all, as long as the ranks are the same.
            identities=before.identities if before is not None and before.identities == identities else identities,
            times=array("d", (now - rank.age_seconds for rank in report.ranks)),
            values=values,
            engine=array("d", map(_number, figures)),
        )

    def as_json(self) -> dict[str, Any]:
        width = len(ROW)
        return {
            "at": self.at,
            **dict(zip(_ENGINE_ROW, map(_known, self.engine), strict=True)),
            "ranks": [
                {"dp_rank": dp_rank, "rank": rank, "pid": pid}
                | dict(zip(ROW, map(_known, self.values[index * width : (index + 1) * width]), strict=True))
                for index, (dp_rank, rank, pid) in enumerate(self.identities)
            ],
        }


class _Row(NamedTuple):
    """One rank's values in a sample: from ``first`` on, used bytes before all others."""

    at: float
    values: array[float]
    first: int


class _Relief(NamedTuple):
    at: float
    is_by_policy: bool


class History:
    """The ring of ``samples`` readings, the events and the marks.

    ``proxied`` returns how many requests have ended that passed the sidecar, and ``host_kept_bytes`` the host memory of
    the engine's container that cannot be dropped: both are kept beside each reading.
    """

    def __init__(
        self,
        samples: int,
        *,
        clocks: Clocks = SYSTEM,
        proxied: Callable[[], int | None] = lambda: None,
        host_kept_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._samples: deque[_Sample] = deque(maxlen=samples)
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._marks: dict[str, Mark] = {}
        self._watchers: dict[asyncio.Queue[Update], str | None] = {}  # with the peer; None: has the token
        self._wall = clocks.wall
        self._monotonic = clocks.monotonic
        self._next_id = 1
        self._cut_at = -math.inf
        self._reliefs: deque[_Relief] = deque(maxlen=RELIEFS_KEPT)
        self.began_at = clocks.wall()
        self.proxied = proxied
        self.host_kept_bytes = host_kept_bytes

    def now(self) -> float:
        """Return the time by which events are dated, in Unix seconds."""
        return self._wall()

    # --- readings ---

    def add(self, report: Report) -> None:
        is_new = not self._samples or self._samples[-1].at != report.taken_at
        if report.taken_at is not None and not report.stale and is_new:
            before = self._samples[-1] if self._samples else None
            beside = (self.proxied(), self.host_kept_bytes())
            self._samples.append(_Sample.of(report, self._monotonic(), before, *beside))
        self._notify(report)

    def readings(self, since: float, step: float) -> tuple[float, list[dict[str, Any]]]:
        """Return readings taken at or after ``since``, oldest first; of each ``step`` seconds the last (0: all).

        May be called from any thread. The first value is the step that was used: a larger one where ``step`` would give
        more than ``MAX_READINGS``, because writing many megabytes of JSON would hold up every stream of the proxy.
        """
        kept = list(self._samples)  # in one step of the interpreter: the loop may add to them meanwhile
        wanted = [sample for sample in kept if sample.at >= since]
        if wanted:
            finest = (wanted[-1].at - wanted[0].at) / (MAX_READINGS - 1)
            step = max(step, finest) if step or len(wanted) > MAX_READINGS else step
        chosen: dict[float, _Sample] = {}
        for index, sample in enumerate(wanted):
            chosen[math.floor(sample.at / step) if step else index] = sample
        return step, [sample.as_json() for sample in chosen.values()]

    def tracks(self, ranks: Sequence[RankReading], seconds: float) -> dict[RankKey, Track]:
        """Return each rank's readings of the last seconds, of the same process, up to the one that is given.

        What lies before a relief by hand is left out, unless there were several: only then it will come again.
        """
        now = self._monotonic()
        reliefs = [relief for relief in self._reliefs if relief.at >= now - seconds]
        earliest = reliefs[0].at if len(reliefs) == 1 and not reliefs[0].is_by_policy else now - seconds
        recent = list(takewhile(lambda one: one.mono >= earliest, reversed(self._samples)))[::-1]
        places = {id(one.identities): {rank: at for at, rank in enumerate(one.identities)} for one in recent}
        return {
            rank.key: Track(
                at=[row.at for row in rows],
                used=[row.values[row.first] for row in rows],
                cut_at=self._cut_at,
                reliefs=[relief.at for relief in reliefs],
                policy_reliefs=[relief.at for relief in reliefs if relief.is_by_policy],
                part=partial(_part, rows),
            )
            for rank in ranks
            if (rows := _rows(rank, recent, places, now)) and not math.isnan(rows[-1].values[rows[-1].first])
        }

    # --- events ---

    def record(
        self,
        kind: EventKind,
        summary: str,
        *,
        trigger: Trigger | None = None,
        rule: str | None = None,
        result: RemedyResult | None = None,
        caller: Caller | None = None,
        why: str | None = None,
        incident: str | None = None,
        state_before: EngineState | None = None,
        state_after: EngineState | None = None,
    ) -> Event:
        event = Event(
            id=self._next_id,
            at=self._wall(),
            kind=kind,
            summary=summary,
            trigger=trigger,
            rule=rule,
            result=result,
            caller=caller,
            why=why,
            incident=incident,
            state_before=state_before,
            state_after=state_after,
        )
        self._next_id += 1
        self._events.append(event)
        if kind in _CUTS and (result is None or result.outcome != "observed"):
            self._cut_at = self._monotonic()
            if result is not None and result.credited_bytes:
                # A release right after a trim is a part of the same relief.
                if self._reliefs and self._cut_at - self._reliefs[-1].at < _ONE_RELIEF_SECONDS:
                    self._reliefs.pop()
                self._reliefs.append(_Relief(self._cut_at, trigger == "policy"))
        self._notify(event)
        return event

    def events(self, *, since: float = 0.0, limit: int = EVENTS_KEPT) -> list[Event]:
        newest_first = (event for event in reversed(self._events) if event.at >= since)
        return [event for event, _ in zip(newest_first, range(limit), strict=False)]

    # --- marks ---

    def mark(self, name: str, ranks: Sequence[RankReading], *, caller: Caller | None = None) -> Mark:
        """Name this moment. A name used before moves to now; the oldest of too many marks is dropped."""
        self._marks.pop(name, None)
        mark = Mark(name, self._wall(), tuple(replace(rank, notes=()) for rank in ranks))
        self._marks[name] = mark
        while len(self._marks) > MARKS_KEPT:
            del self._marks[next(iter(self._marks))]
        used = used_total(ranks)
        together = f" on {len(ranks)} ranks together" if len(ranks) > 1 else ""
        summary = f"mark {name!r}" + (f" at {gib_text(used)} used{together}" if used is not None else "")
        self.record("mark", summary, caller=caller)
        return mark

    @property
    def marks(self) -> Mapping[str, Mark]:
        return self._marks

    # --- watchers ---

    def can_watch(self, peer: str | None = None) -> bool:
        """Return whether there is room for another watcher at this address; ``None``: it has the admin token."""
        peers = list(self._watchers.values())
        if peer is None:
            return peers.count(None) < MAX_OPERATORS_WATCHING
        return len(peers) - peers.count(None) < MAX_WATCHERS and peers.count(peer) < MAX_WATCHERS_PER_PEER

    @contextmanager
    def watch(self, peer: str | None = None) -> Iterator[asyncio.Queue[Update]]:
        """Return a queue of updates. ``None`` ends it: the watcher was too slow, or the sidecar stops."""
        queue: asyncio.Queue[Update] = asyncio.Queue(WATCHER_BACKLOG)
        self._watchers[queue] = peer
        try:
            yield queue
        finally:
            self._watchers.pop(queue, None)

    def close(self) -> None:
        for queue in tuple(self._watchers):
            self._end(queue)

    def _notify(self, update: Update) -> None:
        for queue in tuple(self._watchers):
            try:
                queue.put_nowait(update)
            except asyncio.QueueFull:
                self._end(queue)

    def _end(self, queue: asyncio.Queue[Update]) -> None:
        self._watchers.pop(queue, None)
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(None)


def _values(rank: RankReading) -> Iterator[float]:
    return map(_number, MemoryPoint.of(rank).row().values())


def _identity(rank: RankReading) -> _Identity:
    return rank.dp_rank, rank.rank, rank.pid


def _rows(
    rank: RankReading, recent: Sequence[_Sample], places: Mapping[int, Mapping[_Identity, int]], now: float
) -> list[_Row]:
    """Return a process's rows with known use, oldest first, its present one last; of one reading only one."""
    rows: list[_Row] = []
    for sample in recent:
        place = places[id(sample.identities)].get(_identity(rank))
        if place is None or (rows and sample.times[place] < rows[-1].at + _INSTANT):
            continue
        row = _Row(sample.times[place], sample.values, place * len(ROW))
        if not math.isnan(row.values[row.first]):
            rows.append(row)
    present = _Row(now - rank.age_seconds, array("d", _values(rank)), 0)
    return rows if rows and present.at < rows[-1].at + _INSTANT else [*rows, present]


def _part(rows: Sequence[_Row], name: str) -> list[float]:
    place = ROW.index(name)
    values = [row.values[row.first + place] for row in rows]
    return [] if any(map(math.isnan, values)) else values


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _known(value: float) -> float | int | None:
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else value
