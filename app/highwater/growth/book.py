"""The floors of all series, as rows of values that were measured together; a bounded number, thinned by age.

Idle floors are kept in a file, from which a sidecar goes on after a restart. One line a row is appended; when the file
is too long it is rewritten from the books. Rows are ordered by a clock that only one boot of the machine has, so that
floors of another boot are refused, whatever the wall clocks say.

::

    {"schema": 2, "boot": "9f3c..."}
    {"place": "device", "at": 812.4, "wall": 1.7e9, "work": [...], "lives": [...], "values": [[...], ...]}
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from highwater.growth.series import MAX_FLOORS, Floor, Place, SeriesKey, superfluous
from highwater.model.engine import WorkCounts
from highwater.model.growth import GrowthUnit
from highwater.model.units import MIB
from highwater.process.clocks import boot_id
from highwater.process.errors import os_reason
from highwater.process.regular import NotARegularFileError, open_regular, replace_private

# Eight ranks of thirty series each, with room for processes beside them.
MAX_SERIES = 320
SCHEMA: Final = 2
MAX_FILE_BYTES: Final = 8 * MIB
# A start reads them all, and each takes about a millisecond.
MAX_LINES: Final = 2000
_WORK: Final = tuple(field.name for field in fields(WorkCounts))
_Number: TypeAlias = Annotated[float, Field(ge=-(2**63), le=2**63)]


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
        """Return whether the row was kept: not if it is no later than the last one."""
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
        """Oldest first; empty for an unknown series."""
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


# --- the file ---


class _Line(BaseModel):
    """A row as it is written, complete in itself: each series with its key and value."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    place: Place
    at: _Number
    wall: _Number
    work: tuple[_Number | None, _Number | None, _Number | None, _Number | None, _Number | None]
    lives: list[str]
    values: list[tuple[str, str, GrowthUnit, int, _Number]]

    def measured(self) -> dict[SeriesKey, float]:
        return {
            SeriesKey(owner, measure, self.place, unit, self.lives[life]): value
            for owner, measure, unit, life, value in self.values
            if 0 <= life < len(self.lives)
        }


class FloorFile:
    """The file at ``path``, of this boot of the machine; without either nothing is kept.

    ``problem`` says in one sentence why it cannot be read or written.
    """

    def __init__(self, path: Path | None, *, boot: str | None = None) -> None:
        self._boot = boot or boot_id()
        self._path = None if self._boot is None else path
        self._bytes = self._lines = 0
        self._is_ours = False
        self.problem: str | None = None

    def load(self, books: Mapping[Place, FloorBook], now: float) -> None:
        """Read the floors of this boot up to ``now``. Blocks as long as the disk takes."""
        if self._path is None:
            return
        try:
            with os.fdopen(open_regular(self._path, follows_link=False), "rb") as file:
                content = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return
        except NotARegularFileError:
            self.problem = f"growth: {self._path} is not a file, so idle floors are not kept over a restart"
            return
        except OSError as exc:
            self.problem = f"growth: {self._path} cannot be read: {os_reason(exc)}"
            return
        self._bytes = len(content)
        lines = content.split(b"\n")
        if lines[0] != self._header().strip():
            return  # of another boot, or of another schema: it is rewritten
        # Nothing may be appended to a last line that a crash cut off.
        self._is_ours = not lines[-1]
        self._lines = len(lines)
        for text in lines[1:-1][-MAX_LINES:]:
            try:
                line = _Line.model_validate_json(text)
            except ValidationError:
                continue
            if line.at <= now:
                counts = dict(zip(_WORK, line.work, strict=True))
                books[line.place].add(line.at, line.wall, WorkCounts(**counts), line.measured())

    def keep(self, place: Place, books: Mapping[Place, FloorBook]) -> None:
        """Append the newest row of a book. Blocks as long as the disk takes."""
        if self._path is None:
            return
        text = _text(place, books[place], books[place].rows[-1:])
        try:
            if self._is_ours and self._bytes + len(text) <= MAX_FILE_BYTES and self._lines < MAX_LINES:
                flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(self._path, flags), "ab") as file:
                    file.write(text)
                self._bytes, self._lines = self._bytes + len(text), self._lines + 1
            else:
                rows = (_text(place, book, book.rows) for place, book in books.items())
                content = b"".join([self._header(), *rows])
                replace_private(self._path, content)
                self._bytes, self._lines, self._is_ours = len(content), content.count(b"\n"), True
            self.problem = None
        except OSError as exc:
            self._is_ours = False  # it may be missing, or end in half a line: it is rewritten
            self.problem = f"growth: {self._path} cannot be written: {os_reason(exc)}; a restart forgets idle floors"

    def _header(self) -> bytes:
        return json.dumps({"schema": SCHEMA, "boot": self._boot}).encode() + b"\n"


def _text(place: Place, book: FloorBook, rows: Iterable[FloorRow]) -> bytes:
    lines = []
    for row in rows:
        work, lives = row.work, sorted({key.life for key in book.columns})
        values = [
            (key.owner, key.measure, key.unit, lives.index(key.life), int(value))
            for key, value in zip(book.columns, row.values, strict=False)
            if not math.isnan(value)
        ]
        line = {"place": place, "at": row.at, "wall": row.wall, "work": astuple(work), "lives": lives, "values": values}
        lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return b"".join(lines)
