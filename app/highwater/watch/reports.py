"""The last report: as it ages, and whom each one is passed on to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.growth import without_forecast
from highwater.model.rank import RankKey, RankReading
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.process.logs import contained
from highwater.watch.recorder.rank import RankRecord

log = logging.getLogger("highwater.poller")


class _Arrival(NamedTuple):
    """The time of a reading by the clocks of this machine: a rank's own may be set differently."""

    stamp: float  # its time by the worker's clock
    mono: float  # monotonic seconds
    at: float  # Unix seconds, as they were when it came


class Reports:
    """Dates the readings, keeps the report that was made of them last, and passes each one on.

    A report that is older than ``stale_seconds`` is stale. ``last`` is the report as it was made, and ``load`` are the
    engine's last own counts.
    """

    def __init__(
        self, url: str, clocks: Clocks, stale_seconds: float, *, internal_error: Callable[[], None] = lambda: None
    ) -> None:
        self.last = Report(engine=EngineStatus(url=url, state="starting", hint="not asked yet"))
        self.load = EngineLoad()
        self.listeners: list[Callable[[Report], None]] = []
        self._clocks = clocks
        self._stale_seconds = stale_seconds
        self._internal_error = internal_error
        self._arrivals: dict[RankKey, _Arrival] = {}

    def current(self) -> Report:
        if self.last.taken_at is None:
            return self.last
        aged = replace(self.last, age_seconds=self.age_seconds)
        return stale(aged) if aged.stale or self.age_seconds > self._stale_seconds else aged

    def keep(self, report: Report, load: EngineLoad | None = None) -> None:
        self.last = report
        self.load = load or self.load

    def subscribe(self, listener: Callable[[Report], None]) -> None:
        self.listeners.append(listener)

    def publish(self) -> Report:
        report = self.current()
        for listener in self.listeners:
            name = getattr(listener, "__qualname__", listener)
            # The others must have it, and whoever asked for this round: a relief that is under way, for one.
            with contained(self._internal_error, log, "a listener of reports failed: %s", name):
                listener(report)
        return report

    # --- the time of the readings ---

    @property
    def age_seconds(self) -> float:
        now = self._clocks.monotonic()
        return max((now - arrival.mono for arrival in self._arrivals.values()), default=0.0)

    @property
    def taken_at(self) -> float:
        """The time of the oldest of the readings, in Unix seconds; now without any."""
        return min((arrival.at for arrival in self._arrivals.values()), default=self._clocks.wall())

    def dated(self, ranks: Sequence[RankReading], records: Sequence[RankRecord]) -> tuple[RankReading, ...]:
        """Return the readings with their ages: a response came now, a record as long ago as its writer's clock says."""
        ages = {record.identity.key: record.reading_age_seconds or 0.0 for record in records}
        now, wall, known, self._arrivals = self._clocks.monotonic(), self._clocks.wall(), self._arrivals, {}
        for rank in ranks:
            arrival = known.get(rank.key)
            if arrival is None or arrival.stamp != rank.taken_at:
                ago = ages.get(rank.key, 0.0) if rank.source == "recorder" else 0.0
                arrival = _Arrival(rank.taken_at, now - ago, wall - ago)
            self._arrivals[rank.key] = arrival
        return tuple(replace(rank, age_seconds=max(now - self._arrivals[rank.key].mono, 0.0)) for rank in ranks)


def stale(report: Report) -> Report:
    return replace(report, stale=True, growth=without_forecast(report.growth))
