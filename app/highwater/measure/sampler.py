"""Reads the sidecar beside the load, in a thread: what its history has gathered since, every other second.

The sidecar reads the workers anyway, and their recorders ten times a second; so nothing here asks the engine for
anything. What cannot be read is said in the report, and ends no load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from highwater.accounting.attribution import rank_key
from highwater.client.answers import events_of
from highwater.client.sidecar import SidecarClient
from highwater.errors import SidecarError, SidecarRefused
from highwater.measure.readings import history_ranks, recorded_ranks, traffic_of
from highwater.measure.series import Series
from highwater.readings import EngineLoad, Event, RankReading

EVERY_SECONDS = 2.0
JOIN_SECONDS = 10.0
MAX_TRAFFIC = 4096
OVERLAP_SECONDS = 5.0
_SERVICE_UNAVAILABLE = 503


class Sampler:
    """A thread that reads until it is stopped; a context manager.

    Attributes:
        series: What was read of the ranks.
        traffic: The engine's counts of requests, thinned where they are many.
        events: What happened, oldest first.
        recorded: Whether recorders were read.
        problem: Why the last reading failed; ``None`` if it did not.

    Args:
        client: For this thread alone.
        since: From when on, on the sidecar's clock.
        gap_seconds: From how long on a time without a reading is a gap.
    """

    def __init__(self, client: SidecarClient, since: float, gap_seconds: float) -> None:
        self.series = Series(gap_seconds)
        self.traffic: list[tuple[float, EngineLoad]] = []
        self.recorded = False
        self.problem: str | None = None
        self._events: dict[tuple[int, float], Event] = {}
        self._client, self._since = client, since
        self._wants_recorded = True
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)  # it may be waiting for an answer, and holds nothing up if it goes on

    @property
    def events(self) -> tuple[Event, ...]:
        """Return what happened, oldest first."""
        return tuple(sorted(self._events.values(), key=lambda event: event.at))

    def highest(self) -> RankReading | None:
        """The fullest rank as of its last reading, for a word of progress."""
        with self._turn:
            last = [points[-1] for points in self.series.points().values()]
        return max(last, key=lambda point: point.used_bytes or 0, default=None)

    def read(self) -> None:
        """Read what is new; a failure is kept in ``problem``."""
        with self._turn:
            try:
                self._take(self._ask())
            except SidecarError as exc:
                self.problem = str(exc)
            else:
                self.problem = None

    def add(self, points: Iterable[RankReading]) -> None:
        """Readings from elsewhere, after all that could be read before them."""
        self.read()
        with self._turn:
            self.series.add(points)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self.read()

    def _ask(self) -> Mapping[str, Any]:
        query = {"since": f"{self._since:.6f}"}
        if self._wants_recorded:
            try:
                return self._history({**query, "recorded": "true"})
            except SidecarRefused as exc:
                if exc.status != _SERVICE_UNAVAILABLE:
                    raise
                self._wants_recorded = False
        return self._history(query)

    def _history(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._client.get("/memory/history", query)
        return answer

    def _take(self, answer: Mapping[str, Any]) -> None:
        recorded = list(recorded_ranks(answer.get("recorded", ()), self.series.last_at()))
        # A rank's recorder has all that its readings have, and more often; readings are for ranks without one.
        known = {rank_key(point) for point in recorded}
        self.recorded = self.recorded or bool(known)
        others = [point for point in history_ranks(answer["readings"]) if rank_key(point) not in known]
        self.series.add(sorted([*recorded, *others], key=lambda point: point.taken_at))
        self._count(answer)
        self._events |= {(event.id, event.at): event for event in events_of(answer["events"])}
        # An event may come after a sample that is younger; what comes twice is known by its time.
        newest = min(self.series.last_at().values(), default=0.0)
        self._since = max(self._since, newest - OVERLAP_SECONDS)

    def _count(self, answer: Mapping[str, Any]) -> None:
        last = self.traffic[-1][0] if self.traffic else 0.0
        self.traffic += [each for each in traffic_of(answer["readings"]) if each[0] > last]
        if len(self.traffic) > MAX_TRAFFIC:
            busiest = zip(self.traffic[0:-1:2], self.traffic[1::2], strict=False)
            self.traffic = [max(pair, key=lambda each: each[1].requests_running or 0) for pair in busiest]
