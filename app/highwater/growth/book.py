"""The floors of all series, as rows of values that were measured together; a bounded number, thinned by age."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import astuple
from typing import NamedTuple

from highwater.growth.floors import MAX_FLOORS, Floor, superfluous
from highwater.growth.series import SeriesKey
from highwater.readings.engine import WorkCounts

# Eight ranks of thirty series each, with room for processes beside them.
MAX_SERIES = 320


class FloorRow(NamedTuple):
    """One floor of every series: as ``Floor``, with a value for each column.

    A value is NaN where the series was not measured, and missing where its column is newer.
    """

    at: float
    wall: float
    work: WorkCounts
    values: array[float]
    in_flight: float


class FloorBook:
    """The rows, oldest first, and the series in the order of their columns, each in its newest life."""

    def __init__(self) -> None:
        self.rows: list[FloorRow] = []
        self.columns: list[SeriesKey] = []
        self._column_of: dict[str, int] = {}

    def add(
        self, at: float, wall: float, work: WorkCounts, values: Mapping[SeriesKey, float], in_flight: float = math.nan
    ) -> bool:
        """Keep a row, and return whether it was kept: not if it is no later than the last one."""
        if self.rows and at <= self.rows[-1].at:
            return False
        before = self.rows[-1].work if self.rows else work
        counts = ((before.requests, work.requests), (before.tokens, work.tokens))
        if any(old is not None and new is not None and new < old for old, new in counts):
            self.rows.clear()  # counters that begin again are another engine's
        for key in values:
            self._assign_column(key)
        floors = array("d", [math.nan] * len(self.columns))
        for key, value in values.items():
            column = self._column_of.get(key.name)
            if column is not None:
                floors[column] = value
        self.rows.append(FloorRow(at, wall, work, floors, in_flight))
        if len(self.rows) > MAX_FLOORS:
            del self.rows[superfluous([row.at for row in self.rows])]
        return True

    def floors(self, name: str) -> list[Floor]:
        """Return a series' floors, oldest first; empty for an unknown series."""
        column = self._column_of.get(name)
        if column is None:
            return []
        return [
            Floor(
                row.at, row.wall, row.values[column], *(math.nan if one is None else one for one in astuple(row.work))
            )._replace(in_flight=row.in_flight)
            for row in self.rows
            if column < len(row.values) and not math.isnan(row.values[column])
        ]

    def key(self, name: str) -> SeriesKey | None:
        column = self._column_of.get(name)
        return None if column is None else self.columns[column]

    def _assign_column(self, key: SeriesKey) -> None:
        """Give a series a column; a series of another life begins anew in the column of its predecessor."""
        column = self._column_of.get(key.name)
        if column is None:
            if len(self.columns) < MAX_SERIES:
                self._column_of[key.name] = len(self.columns)
                self.columns.append(key)
        elif self.columns[column].life != key.life:
            self.columns[column] = key
            for row in self.rows:
                if column < len(row.values):
                    row.values[column] = math.nan
