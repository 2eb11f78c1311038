"""The entry table of a recorder file: the encoder cache's entries, and what else changes seldom."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypedDict

from pydantic import Field, TypeAdapter, ValidationError

from highwater.accounting.engine_budget import EngineBudget
from highwater.flaws import flaw
from highwater.readings.rank import Note, StartPhase, WorkerBudget
from highwater.readings.schema import MAX_NUMBER
from highwater.recorder.identity import Count, Seconds
from highwater.recorder.untrusted import is_within_bounds, json_object
from highwater.text.printable import printable

# More phases and notes than a worker writes: files may say anything.
MAX_PHASES = 32
MAX_NOTES = 32
MAX_TEXT = 1000
_HEAD_LENGTH = struct.Struct("<I")
_ROW = struct.Struct("<64sQdB7x")


class EntryRow(TypedDict):
    mm_hash: str  # its first 64 characters
    bytes: int
    residency: str  # `device` or `host`
    age_seconds: float  # a lower bound


def largest_first(row: EntryRow) -> tuple[int, str]:
    return -row["bytes"], row["mm_hash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableHead:
    mono: Seconds
    total: Count
    budget: WorkerBudget = field(default_factory=WorkerBudget)
    start: Annotated[tuple[StartPhase, ...], Field(max_length=MAX_PHASES)] = ()
    # Validated by itself: one invalid figure in it must not cost the entries.
    engine_budget: dict[str, Any] | None = None
    notes: Annotated[tuple[Note, ...], Field(max_length=MAX_NOTES)] = ()


_HEAD = TypeAdapter(_TableHead)
_ENGINE_BUDGET = TypeAdapter(EngineBudget)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTable:
    mono: float  # when entries came or went last, on the writer's monotonic clock
    total: int  # how many entries there are; the table may have fewer
    budget: WorkerBudget
    start: tuple[StartPhase, ...]  # the phases of the worker's start
    notes: tuple[Note, ...]
    rows: bytes  # the entries as they stand in the file
    engine_budget: EngineBudget | None = None  # `None` where the file has none, or an invalid one

    def entries(self, mono: float) -> Iterator[EntryRow]:
        """Return the valid entries, as first seen one after another; ages as of ``mono``, on the writer's clock."""
        for name, nbytes, seen_mono, is_on_host in _ROW.iter_unpack(self.rows):
            if nbytes <= MAX_NUMBER and 0 <= seen_mono <= MAX_NUMBER:
                yield EntryRow(
                    mm_hash=printable(name.rstrip(b"\0").decode("ascii", "replace"), instead="?"),
                    bytes=nbytes,
                    residency="host" if is_on_host else "device",
                    age_seconds=round(max(mono - seen_mono, 0.0), 3),
                )


def parse_table(body: bytes) -> EntryTable | None:
    if len(body) < _HEAD_LENGTH.size:
        return None
    rows_at = _HEAD_LENGTH.size + _HEAD_LENGTH.unpack_from(body)[0]
    if rows_at > len(body) or (len(body) - rows_at) % _ROW.size:
        return None
    given = json_object(body[_HEAD_LENGTH.size : rows_at])
    try:
        head = _HEAD.validate_python(given)
    except ValidationError:
        return None
    notes = [Note(name=_short(note.name), reason=_short(note.reason)) for note in head.notes]
    engine_budget, problem = _engine_budget(head.engine_budget)
    if problem is not None:
        notes.append(Note(name="engine_budget", reason=f"the file has none that can be read: {problem}"))
    return EntryTable(
        mono=head.mono,
        total=head.total,
        budget=head.budget if is_within_bounds(head.budget) else WorkerBudget(),
        start=tuple(
            replace(phase, name=_short(phase.name), error=None if phase.error is None else _short(phase.error))
            for phase in head.start
            if is_within_bounds(phase)
        ),
        notes=tuple(notes),
        rows=body[rows_at:],
        engine_budget=engine_budget,
    )


def _engine_budget(given: dict[str, Any] | None) -> tuple[EngineBudget | None, str | None]:
    if given is None:
        return None, None
    try:
        # JSON can name halves of characters, which no response of ours could hold.
        json.dumps(given, ensure_ascii=False).encode()
        return _ENGINE_BUDGET.validate_python(given), None
    except UnicodeEncodeError:
        return None, "a text is no Unicode"
    except ValidationError as exc:
        return None, flaw(exc.errors())


def _short(text: str) -> str:
    return printable(text[:MAX_TEXT])
