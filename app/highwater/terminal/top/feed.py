"""The sidecar followed, also across its restarts: its last report, the past, and whether it responds."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeAlias

from highwater.diagnose.verdict import JudgedReport
from highwater.model.components import COMPONENT_NAMES, ROW, MemoryPoint
from highwater.model.rank import RankKey, RankReading, key_of
from highwater.model.report import Event
from highwater.process.errors import SidecarError
from highwater.terminal.client import SidecarClient, event_of, events_of, follow, report_of, understood

MAX_POINTS = 2000
MAX_EVENTS = 100
HISTORY_SECONDS = 900.0
MAX_PAUSE_SECONDS = 2.0
# One reading of so many seconds is fetched: a line has no more cells.
STEP_SECONDS = 3.0

_TIME = attrgetter("at")

Past: TypeAlias = Mapping[RankKey, tuple[MemoryPoint, ...]]


@dataclass(frozen=True, slots=True)
class View:
    """The knowledge at one moment; times are monotonic seconds of this process.

    ``past`` is each rank's memory, oldest first, ``events`` newest first; ``problem`` is why no report comes, since
    ``lost_at``.
    """

    url: str
    report: JudgedReport
    received_at: float
    past: Past = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    problem: str | None = None
    lost_at: float | None = None

    def with_report(self, report: JudgedReport, now: float) -> View:
        view = replace(self, report=report, received_at=now, problem=None, lost_at=None)
        if report.taken_at is None or report.stale:
            return view
        at = report.taken_at
        return view.with_history({rank.key: (replace(MemoryPoint.of(rank), at=at),) for rank in report.ranks}, ())

    def with_history(self, past: Past, events: Iterable[Event]) -> View:
        """Add the sidecar's history; what it has lost by a restart stays."""
        merged = dict(self.past)
        for key, more in past.items():
            points = list(merged.get(key, ()))
            for point in more:  # what is known of a time already stays
                place = bisect_left(points, point.at, key=_TIME)
                if place == len(points) or points[place].at != point.at:
                    points.insert(place, point)
            merged[key] = tuple(points[-MAX_POINTS:])
        # A sidecar that was restarted numbers its events from 1 again.
        numbered = {(event.id, event.at): event for event in (*events, *self.events)}
        newest = sorted(numbered.values(), key=lambda event: (event.at, event.id), reverse=True)
        return replace(self, past=merged, events=tuple(newest[:MAX_EVENTS]))

    def without_sidecar(self, problem: str, now: float) -> View:
        return replace(self, problem=problem, lost_at=self.lost_at if self.lost_at is not None else now)

    def age_seconds(self, now: float) -> float | None:
        """Return how old the readings are, whichever clock the sidecar has."""
        age = self.report.age_seconds
        return None if age is None else age + max(now - self.received_at, 0.0)

    def points(self, rank: RankReading, name: str) -> list[tuple[float, float | None]]:
        known = self.past.get(rank.key, ())
        return [(point.at, getattr(point.components if name in COMPONENT_NAMES else point, name)) for point in known]


def past_of(readings: object) -> Past:
    past: dict[RankKey, list[MemoryPoint]] = {}
    for reading in readings if isinstance(readings, list) else ():
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            for row in reading["ranks"]:
                numbers = {name: value for name in ROW if isinstance(value := row.get(name), int | float)}
                point = MemoryPoint.of_row(float(reading["at"]), dict.fromkeys(ROW) | numbers)
                past.setdefault(key_of(row["dp_rank"], row["rank"]), []).append(point)
    return {key: tuple(points) for key, points in past.items()}


# --- following ---


def follow_memory(
    connect: Callable[[], SidecarClient], pause: Callable[[float], bool | None]
) -> Iterator[tuple[str, Any]]:
    return follow(connect, history_of, pause, max_pause_seconds=MAX_PAUSE_SECONDS)


def history_of(sidecar: SidecarClient) -> dict[str, Any]:
    with understood("/memory/history"):
        # By its own clock, which may differ from this machine's.
        now = sidecar.get("/memory/history", {"since": "9999999999"}).get("now")
        since = now - HISTORY_SECONDS if isinstance(now, int | float) else 0.0
        return {**sidecar.get("/memory/history", {"since": str(since), "step": str(STEP_SECONDS)})}


def first_view(sidecar: SidecarClient) -> View:
    report = report_of(sidecar.get("/memory"))
    history = history_of(sidecar)
    view = View(sidecar.url, report, time.monotonic())
    return view.with_history(past_of(history.get("readings")), events_of(history.get("events")))


class Feed(threading.Thread):
    """A thread that keeps ``view`` up to date: it is another object after each message."""

    def __init__(self, view: View, connect: Callable[[], SidecarClient]) -> None:
        # A daemon: `top` ends without waiting for the sidecar.
        super().__init__(name="feed", daemon=True)
        self.view = view
        self._connect = connect
        self._ended = threading.Event()

    def stop(self) -> None:
        self._ended.set()

    def run(self) -> None:
        for name, data in follow_memory(self._connect, self._ended.wait):
            if self._ended.is_set():
                return
            self.view = updated(self.view, name, data, time.monotonic())


def updated(view: View, name: str, data: Any, now: float) -> View:  # noqa: ANN401 - JSON
    if name == "lost":
        return view.without_sidecar(str(data), now)
    if name == "past":
        return view.with_history(past_of(data.get("readings")), events_of(data.get("events")))
    if name == "report":
        try:
            return view.with_report(report_of(data), now)
        except SidecarError as exc:
            return view.without_sidecar(str(exc), now)
    event = event_of(data) if name == "event" else None
    return view if event is None else view.with_history({}, (event,))
