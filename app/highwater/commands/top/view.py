"""The knowledge of ``highwater top`` at one moment: the last report, the past, and whether the sidecar answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from highwater.accounting.attribution import COMPONENTS, RankKey, rank_key
from highwater.accounting.points import ROW, MemoryPoint
from highwater.readings import Event, RankReading, Report

MAX_POINTS = 2000
MAX_EVENTS = 100
HISTORY_SECONDS = 900.0

Past: TypeAlias = Mapping[RankKey, tuple[MemoryPoint, ...]]


@dataclass(frozen=True, slots=True)
class View:
    """The knowledge at one moment; times are monotonic seconds of this process.

    Attributes:
        url: The sidecar's.
        report: The last report.
        received_at: When it came.
        past: Each rank's memory until then, oldest first.
        events: Newest first.
        problem: Why no report comes; ``None`` while they do.
        lost_at: When that began.
    """

    url: str
    report: Report
    received_at: float
    past: Past = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    problem: str | None = None
    lost_at: float | None = None

    def with_report(self, report: Report, now: float) -> View:
        """Add a report that just came."""
        view = replace(self, report=report, received_at=now, problem=None, lost_at=None)
        if report.taken_at is None or report.stale:
            return view
        at = report.taken_at
        return view.with_history({rank_key(rank): (replace(MemoryPoint.of(rank), at=at),) for rank in report.ranks}, ())

    def with_history(self, past: Past, events: Iterable[Event]) -> View:
        """Add the sidecar's history; what it has lost by a restart stays."""
        merged = {key: _merged(past.get(key, ()), self.past.get(key, ())) for key in {**self.past, **past}}
        # A sidecar that was restarted numbers its events from 1 again.
        known = {(event.id, event.at): event for event in (*events, *self.events)}
        newest = sorted(known.values(), key=lambda event: (event.at, event.id), reverse=True)
        return replace(self, past=merged, events=tuple(newest[:MAX_EVENTS]))

    def with_event(self, event: Event) -> View:
        """Add an event that just came."""
        return self.with_history({}, (event,))

    def without_sidecar(self, problem: str, now: float) -> View:
        """Note that the sidecar does not respond; the last figures stay, with their age."""
        return replace(self, problem=problem, lost_at=self.lost_at if self.lost_at is not None else now)

    def age_seconds(self, now: float) -> float | None:
        """Return how old the readings are, whichever clock the sidecar has."""
        age = self.report.age_seconds
        return None if age is None else age + max(now - self.received_at, 0.0)

    def points(self, rank: RankReading, name: str) -> list[tuple[float, float | None]]:
        """Return the past of one field of a rank, oldest first."""
        known = self.past.get(rank_key(rank), ())
        return [(point.at, getattr(point.components if name in COMPONENTS else point, name)) for point in known]


def _merged(remembered: tuple[MemoryPoint, ...], known: tuple[MemoryPoint, ...]) -> tuple[MemoryPoint, ...]:
    if not (remembered and known) or remembered[0].at > known[-1].at:
        return (*known, *remembered)[-MAX_POINTS:]
    points = {point.at: point for point in (*remembered, *known)}
    return tuple(points[at] for at in sorted(points))[-MAX_POINTS:]


def past_of(readings: object) -> Past:
    """Return the readings of ``GET /memory/history`` by rank; what is not in shape is left out."""
    past: dict[RankKey, list[MemoryPoint]] = {}
    for key, point in _points(readings if isinstance(readings, list) else ()):
        past.setdefault(key, []).append(point)
    return {key: tuple(points) for key, points in past.items()}


def _points(readings: Iterable[Any]) -> Iterator[tuple[RankKey, MemoryPoint]]:
    for reading in readings:
        try:
            for row in reading["ranks"]:
                numbers = {name: value for name in ROW if isinstance(value := row.get(name), int | float)}
                point = MemoryPoint.of_row(float(reading["at"]), dict.fromkeys(ROW) | numbers)
                yield (int(row["dp_rank"] or 0), int(row["rank"] or 0)), point
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
