"""The time of each rank's last reading by the clocks of this machine: a rank's own may be set differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from highwater.accounting.rank_key import rank_key
from highwater.readings.rank import RankReading
from highwater.recorder.rank import RankRecord


class _Arrival(NamedTuple):
    stamp: float  # its time by the worker's clock
    mono: float  # monotonic seconds
    at: float  # Unix seconds, as they were when it came


class Arrivals:
    """Dates the readings of one report; ``clock`` returns monotonic seconds, ``wall_clock`` Unix seconds."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._known: dict[tuple[int, int], _Arrival] = {}

    @property
    def age_seconds(self) -> float:
        now = self._clock()
        return max((now - arrival.mono for arrival in self._known.values()), default=0.0)

    @property
    def taken_at(self) -> float:
        """The time of the oldest of the readings, in Unix seconds; now without any."""
        return min((arrival.at for arrival in self._known.values()), default=self._wall_clock())

    def dated(self, ranks: Sequence[RankReading], records: Sequence[RankRecord]) -> tuple[RankReading, ...]:
        ages = {rank_key(record.identity): record.reading_age_seconds or 0.0 for record in records}
        self._known = {rank_key(rank): self._arrival(rank, ages.get(rank_key(rank), 0.0)) for rank in ranks}
        now = self._clock()
        return tuple(replace(rank, age_seconds=max(now - self._known[rank_key(rank)].mono, 0.0)) for rank in ranks)

    def _arrival(self, rank: RankReading, recorded_seconds_ago: float) -> _Arrival:
        """Return when a reading was taken: a response as it came, a record as long ago as its writer's clock says."""
        known = self._known.get(rank_key(rank))
        if known is not None and known.stamp == rank.taken_at:
            return known
        ago = recorded_seconds_ago if rank.source == "recorder" else 0.0
        return _Arrival(rank.taken_at, self._clock() - ago, self._wall_clock() - ago)
