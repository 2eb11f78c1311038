"""The floors of all series that were measured at the same moments: a bounded number of moments, thinned by age."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from highwater.growth.floors import MAX_FLOORS, Floor, superfluous
from highwater.growth.series import SeriesKey
from highwater.readings import WorkCounts

# Eight ranks of thirty series each, with room for processes beside them.
MAX_SERIES = 320


@dataclass(frozen=True, slots=True)
class Moment:
    """One idle floor of every series.

    Attributes:
        at: Monotonic seconds since the machine's boot.
        wall: Unix seconds.
        work: What the engine had done until then.
        values: By the series' columns; NaN, or too short, where one was not measured.
    """

    at: float
    wall: float
    work: WorkCounts
    values: array[float]

    def floor(self, column: int) -> Floor | None:
        """Return the floor of the series in this column; ``None`` where it was not measured."""
        value = self.values[column] if column < len(self.values) else math.nan
        if math.isnan(value):
            return None
        work = self.work
        return Floor(
            self.at,
            self.wall,
            value,
            _number(work.requests),
            _number(work.images),
            _number(work.new_images),
            _number(work.tokens),
        )


class FloorBook:
    """The moments, and the columns of the series in them.

    Attributes:
        moments: Oldest first.
        columns: The series in the order of their columns. Of two lives of a series the later one is kept.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.columns: list[SeriesKey] = []
        self._column_of: dict[str, int] = {}

    def add(self, at: float, wall: float, work: WorkCounts, values: Mapping[SeriesKey, float]) -> bool:
        """Keep a moment.

        Returns:
            Whether it was kept: not where it is no later than the last one.
        """
        if self.moments and at <= self.moments[-1].at:
            return False
        if self.moments and _fell(self.moments[-1].work, work):
            self.moments.clear()  # counters that begin again are another engine's
        for key in values:
            self._take(key)
        row = array("d", [math.nan] * len(self.columns))
        for key, value in values.items():
            column = self._column_of.get(key.name)
            if column is not None:
                row[column] = value
        self.moments.append(Moment(at, wall, work, row))
        if len(self.moments) > MAX_FLOORS:
            del self.moments[superfluous([moment.at for moment in self.moments])]
        return True

    def floors(self, name: str) -> list[Floor]:
        """Return a series' floors, oldest first; empty for one that is not known."""
        column = self._column_of.get(name)
        if column is None:
            return []
        return [floor for moment in self.moments if (floor := moment.floor(column)) is not None]

    def key(self, name: str) -> SeriesKey | None:
        """Return the series of that name."""
        column = self._column_of.get(name)
        return None if column is None else self.columns[column]

    def lives(self) -> set[str]:
        """Return the lives of all its series."""
        return {key.life for key in self.columns}

    def _take(self, key: SeriesKey) -> None:
        """Give a series its column; one of another life begins anew in the column of its predecessor."""
        column = self._column_of.get(key.name)
        if column is None:
            if len(self.columns) < MAX_SERIES:
                self._column_of[key.name] = len(self.columns)
                self.columns.append(key)
            return
        if self.columns[column].life != key.life:
            self.columns[column] = key
            for moment in self.moments:
                if column < len(moment.values):
                    moment.values[column] = math.nan


def _fell(before: WorkCounts, now: WorkCounts) -> bool:
    return any(
        was is not None and is_now is not None and is_now < was
        for was, is_now in ((before.requests, now.requests), (before.tokens, now.tokens))
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
