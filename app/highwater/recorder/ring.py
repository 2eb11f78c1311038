"""One worker's recorder file, read as foreign bytes while it is written. docs/recorder.md is the contract.

Only ``pread`` is used, never a mapping: a file that somebody truncates is then a short answer and not the end of this
process. Nothing in a file makes a reader raise anything but ``RingUnusable``, or do more than a fixed amount of work.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from highwater.accounting.engine_budget import EngineBudget
from highwater.errors import flaw, os_reason
from highwater.files.regular import NotARegularFileError, open_regular
from highwater.readings import Device, Note, StartPhase, WorkerBudget
from highwater.text.printable import printable
from highwater.text.table import rank_title

VERSION = 2
MAGIC = b"HIGHWATR"
RING_NAME = re.compile(r"highwater-([0-9a-f]{16})-([0-9]{1,10})\.ring", re.ASCII)

MAX_FILE_BYTES = 64 * 1024 * 1024
# What a header may claim, so that no file makes much work: the size of a header has two bytes anyway.
_MAX_HEADER_BYTES = 64 * 1024
_MIN_SLOT_BYTES, _MAX_SLOT_BYTES = 256, 64 * 1024
_MIN_AREA_BYTES = 256
_MAX_HEARTBEAT_BYTES, _MAX_TABLE_BYTES, _MAX_STACK_BYTES = 64 * 1024, 2 * 1024 * 1024, 1024 * 1024
# Of a stack that runs over the end of the file: what is read of it.
_MAX_DUMP_BYTES = 256 * 1024
# What a heartbeat has unless a dump of stacks is in it.
_SHORT_HEARTBEAT_BYTES = 2048
# What one pread asks for: three seconds of a worker that samples ten times a second.
_WINDOW_BYTES = 64 * 1024
# How many damaged slots in a row may lie between two good ones and not be taken for the end.
_GAP_SLOTS = 4
# Of numbers in a file: beyond it, sums in floats and in C would go wrong elsewhere.
_MAX_NUMBER = 2**63 - 1

_HEADER = struct.Struct("<8sHHIIIIIII")
_CHECKED_HEADER_BYTES = 36
_SLOT = struct.Struct("<QII")
_CHECKED_SLOT_BYTES = 12
_HEAD_LENGTH = struct.Struct("<I")
_ROW = struct.Struct("<64sQdB7x")
_STACK_HEAD = struct.Struct("<dd")

_Count: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
# Names come into logs and sentences for operators: no control characters.
# More ranks than any engine has, and more phases and notes than a worker writes: files may say anything.
_Ranks: TypeAlias = Annotated[int, Field(ge=0, le=4096)]
MAX_PHASES = 32
MAX_NOTES = 32
MAX_TEXT = 1000
_Word: TypeAlias = Annotated[str, Field(max_length=255, pattern=r"^[ -~]*$")]
_Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RingUnusable(Exception):
    """The file is left alone.

    Attributes:
        reason: Why, in words that begin with one of: truncated, foreign, version, corrupt header, corrupt identity,
            not a regular file, too large, unreadable.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The writer of a ring; names and meanings are those of the worker's answers (worker_ext/README.md).

    Attributes:
        instance: One life of the engine, as the sidecar named it.
        pid: As the writer's own PID namespace numbers it.
        pid_started: Field 22 of ``/proc/<pid>/stat``: distinguishes a process from a later one with its number.
        boot_id: Of the writer's kernel.
        started_at: Unix seconds.
        rate: Samples in a second.
        seconds: How long the ring reaches back.
        extension: The version of the worker extension.
        main_thread: The number that dumps of stacks give the thread that the steps run on.
        ranks_expected: How many workers the API server has.
        data_parallel: How many engines share the work; likewise stages and parts of one engine.
        model: The name under which it is served.
        rpc: Whether the worker has our operations, so that they may be called; ``None`` where it does not say.
        self_started: Whether the worker started its recorder by itself, as the engine came up.
    """

    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    rank: _Count | None = None
    local_rank: _Count | None = None
    dp_rank: _Count | None = None
    tp_rank: _Count | None = None
    pp_rank: _Count | None = None
    host: _Word | None = None
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)]
    pid_started: _Count | None = None
    boot_id: _Word | None = None
    device: Device
    started_at: _Seconds
    rate: Annotated[float, Field(gt=0, le=10_000)]
    seconds: _Seconds
    extension: _Word | None = None
    main_thread: _Count | None = None
    ranks_expected: _Ranks | None = None
    data_parallel: _Ranks | None = None
    pipeline_parallel: _Ranks | None = None
    tensor_parallel: _Ranks | None = None
    model: _Word | None = None
    rpc: bool | None = None
    self_started: bool | None = None

    @property
    def name(self) -> str:
        """The rank as an operator calls it: ``rank 1 (pid 4243 on node-a)``."""
        where = f" on {self.host}" if self.host else ""
        return f"rank {rank_title(self.dp_rank, self.rank)} (pid {self.pid}{where})"


_IDENTITY = TypeAdapter(Identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableHead:
    mono: _Seconds
    total: _Count
    budget: WorkerBudget = field(default_factory=WorkerBudget)
    start: Annotated[tuple[StartPhase, ...], Field(max_length=MAX_PHASES)] = ()
    # Validated by itself: one odd figure in it must not cost the entries.
    engine_budget: dict[str, Any] | None = None
    notes: Annotated[tuple[Note, ...], Field(max_length=MAX_NOTES)] = ()


_TABLE_HEAD = TypeAdapter(_TableHead)
_ENGINE_BUDGET = TypeAdapter(EngineBudget)


@dataclass(frozen=True, slots=True)
class CachedEntry:
    """One entry of a rank's encoder cache.

    Attributes:
        mm_hash: Its first 64 characters.
        bytes: What it takes.
        residency: ``device`` or ``host``.
        seen_mono: When it was first seen, on the writer's monotonic clock.
    """

    mm_hash: str
    bytes: int
    residency: str
    seen_mono: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTable:
    """The entries of a rank's encoder cache, and what else changes seldom.

    Attributes:
        mono: When it was written, on the writer's monotonic clock: when entries came or went last.
        total: How many entries there are; the table may have fewer.
        budget: What the engine was configured to take.
        start: The phases of the worker's start.
        engine_budget: What the start left in the worker's attributes; ``None`` where nothing says it.
        notes: What could not be read, and why.
        rows: The entries as they stand in the file.
    """

    mono: float
    total: int
    budget: WorkerBudget
    start: tuple[StartPhase, ...]
    notes: tuple[Note, ...]
    rows: bytes
    engine_budget: EngineBudget | None = None

    def entries(self) -> Iterator[CachedEntry]:
        """The entries, in the order in which they were first seen; what no writer would write is left out."""
        return (
            CachedEntry(_hash_text(name), nbytes, "host" if is_on_host else "device", seen_mono)
            for name, nbytes, seen_mono, is_on_host in _ROW.iter_unpack(self.rows)
            if nbytes <= _MAX_NUMBER and 0 <= seen_mono <= _MAX_NUMBER
        )


@dataclass(frozen=True, slots=True)
class WatchdogDump:
    """Every thread's stack, written because no Python thread of the process could run.

    Attributes:
        armed_mono: When one ran last, on the writer's monotonic clock.
        seconds: How long after that the stacks were taken.
        text: As Python's ``faulthandler`` writes them.
    """

    armed_mono: float
    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The places of a file's parts, by its header."""

    header_bytes: int
    slot_bytes: int
    slots: int
    heartbeat_bytes: int
    table_bytes: int
    stack_bytes: int

    @property
    def tables_at(self) -> int:
        return self.header_bytes + 2 * self.heartbeat_bytes

    @property
    def ring_at(self) -> int:
        return self.tables_at + 2 * self.table_bytes

    @property
    def stack_at(self) -> int:
        return self.ring_at + self.slots * self.slot_bytes

    @property
    def nbytes(self) -> int:
        return self.stack_at + self.stack_bytes

    @property
    def is_possible(self) -> bool:
        return (
            self.slots > 0
            and _MIN_SLOT_BYTES <= self.slot_bytes <= _MAX_SLOT_BYTES
            and _MIN_AREA_BYTES <= self.heartbeat_bytes <= _MAX_HEARTBEAT_BYTES
            and _MIN_AREA_BYTES <= self.table_bytes <= _MAX_TABLE_BYTES
            and _MIN_AREA_BYTES <= self.stack_bytes <= _MAX_STACK_BYTES
        )


class Ring:
    """One file, held open; ``read`` gives what was written since the last time.

    Args:
        path: The file. A link is not followed, and a named pipe not waited for.

    Attributes:
        path: As given.
        identity: Who writes it.
        inode: Device and inode: another file under the same name has others.
        skipped: Records that were overwritten, damaged or passed by before they were read.
        problem: What is wrong with the file at present, in words; ``None`` if nothing is.

    Raises:
        RingUnusable: It is no ring that this version reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self.problem: str | None = None
        self._descriptor = _open(path)
        try:
            status = os.fstat(self._descriptor)
            self.inode = (status.st_dev, status.st_ino)
            self._layout, identity = _header(self._descriptor, status)
            self._slot_bytes, self._slots = self._layout.slot_bytes, self._layout.slots
            self.identity = _identity(identity, path.name)
        except OSError as exc:
            self.close()
            raise RingUnusable(_unreadable(exc)) from exc
        except RingUnusable:
            self.close()
            raise
        self._window = min(max(_WINDOW_BYTES // self._slot_bytes, 1), self._slots)
        self._heartbeat = self._table = 0  # the sequence numbers of those that were returned last
        self._last = 0  # the highest sequence number seen
        self._cursor = 0  # where the next look for records that are not where they should be begins

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> Iterator[dict[str, Any]]:
        """The new records, newest first: where there are more than two windows of them, the newest.

        They are decoded as they are asked for: ten times a second a worker writes what one look in a second needs once.

        One ``pread`` where the reader keeps up, two at the end of the file; damaged slots are passed by, and one that
        is being written is read next time.

        Raises:
            RingUnusable: It cannot be read any more.
        """
        try:
            found = self._new_records()
        except OSError as exc:
            raise RingUnusable(_unreadable(exc)) from exc
        if found:
            newest = found[-1][0]
            if self._last:
                self.skipped += newest - self._last - len(found)
            self._last = newest
        return self._decoded(reversed(found))

    def newest(self, max_records: int) -> list[dict[str, Any]]:
        """The last records, oldest first, whatever was read before. The whole file is read for it.

        Raises:
            RingUnusable: It cannot be read any more.
        """
        found: list[tuple[int, bytes]] = []
        try:
            for index in range(0, self._slots, self._window):
                found += self._records(index, min(self._window, self._slots - index), after=0)
        except OSError as exc:
            raise RingUnusable(_unreadable(exc)) from exc
        found.sort(key=_sequence)
        return list(self._decoded(found[-max_records:]))

    # --- beside the records ---

    def heartbeat(self) -> dict[str, Any] | None:
        """The last heartbeat; ``None`` where none is new since the last time.

        Raises:
            RingUnusable: It cannot be read any more.
        """
        size = self._layout.heartbeat_bytes
        found = self._newer_of_two(self._layout.header_bytes, size, min(size, _SHORT_HEARTBEAT_BYTES), self._heartbeat)
        if found is None:
            return None
        self._heartbeat, body = found
        value = _json_object(body)
        if value is None:
            self.skipped += 1
        return value

    def table(self) -> EntryTable | None:
        """The last entry table; ``None`` where none is new since the last time.

        Raises:
            RingUnusable: It cannot be read any more.
        """
        size = self._layout.table_bytes
        found = self._newer_of_two(self._layout.tables_at, size, _SLOT.size, self._table)
        if found is None:
            return None
        self._table, body = found
        table = _entry_table(body)
        if table is None:
            self.skipped += 1
        return table

    def dump(self) -> WatchdogDump | None:
        """The stacks of a process in which no Python thread could run; ``None`` where one has run since.

        Raises:
            RingUnusable: It cannot be read any more.
        """
        at, least = self._layout.stack_at, _STACK_HEAD.size + 1
        if len(head := self._pread(at, least)) < least or not head[-1]:
            return None
        content = self._pread(at, _MAX_DUMP_BYTES)
        armed_mono, seconds = _STACK_HEAD.unpack_from(content)
        text = content[_STACK_HEAD.size :].partition(b"\0")[0].decode("ascii", "replace")
        if not (0 <= armed_mono <= _MAX_NUMBER and 0 <= seconds <= _MAX_NUMBER):
            return None
        return WatchdogDump(armed_mono, seconds, text)

    def _newer_of_two(self, at: int, size: int, first_bytes: int, last: int) -> tuple[int, bytes] | None:
        """The newer of two areas that are written in turn, if it is newer than ``last``: its number and its body."""
        starts = [(self._pread(start, first_bytes), start) for start in (at, at + size)]
        whole = [(content, start) for content, start in starts if len(content) == first_bytes]
        for content, start in sorted(whole, key=_area_sequence, reverse=True):
            sequence, length, _ = _SLOT.unpack_from(content)
            if sequence <= last or length > size - _SLOT.size:
                continue
            needed = _SLOT.size + length
            frame = content if needed <= first_bytes else self._pread(start, needed)
            record = _framed(frame, 0) if len(frame) >= needed else None
            if record is not None:  # the other is older, and good: this one is being written
                return record
        return None

    def _pread(self, at: int, size: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, at)
        except OSError as exc:
            raise RingUnusable(_unreadable(exc)) from exc

    # --- where the records are ---

    def _new_records(self) -> list[tuple[int, bytes]]:
        self.problem = None
        at_start = not self._last
        found = self._records(self._last % self._slots, self._window, after=self._last)
        if not found:
            # None yet; or, after damage or a long pause, they are elsewhere: one more window is looked at each time.
            at_start = True
            found = self._records(self._cursor, self._window, after=self._last)
            self._cursor = (self._cursor + self._window) % self._slots
        if not found:
            return []
        found.sort(key=_sequence)
        highest = found[-1][0]
        if not at_start and highest < self._last + self._window:
            return found
        end = self._end(highest)
        first = max(end - self._window, self._last)
        latest = self._records(first % self._slots, self._window, after=first)
        # What was found on the way may be from anywhere in the ring, where it was not sought where it should be.
        return sorted(latest if at_start else {*found, *latest}, key=_sequence)

    def _end(self, low: int) -> int:
        """The newest record, found by halving: each slot after a good record holds the next one, or an older one."""
        high = low + self._slots
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_written(middle, high):
                low = middle
            else:
                high = middle
        return low

    def _is_written(self, sequence: int, before: int) -> bool:
        for near in range(sequence, min(sequence + _GAP_SLOTS, before)):
            record = _framed(self._span((near - 1) % self._slots, 1), 0)
            if record is not None:
                return record[0] >= near
        return False

    # --- slots ---

    def _records(self, index: int, count: int, *, after: int) -> list[tuple[int, bytes]]:
        """The good ones among so many slots that are newer than ``after``, in the slots' order."""
        span, found = self._span(index, count), []
        for place in range(count):
            offset = place * self._slot_bytes
            if _SLOT.unpack_from(span, offset)[0] <= after:
                continue
            record = _framed(span[offset : offset + self._slot_bytes], 0)
            if record is not None and (record[0] - 1 - index - place) % self._slots == 0:
                found.append(record)
        return found

    def _span(self, index: int, count: int) -> bytes:
        """So many slots from one on, going on at the first after the last; what the file lacks is zero."""
        until_end = min(count, self._slots - index)
        span = self._slots_from(index, until_end)
        return span if until_end == count else span + self._slots_from(0, count - until_end)

    def _slots_from(self, index: int, count: int) -> bytes:
        size = count * self._slot_bytes
        span = os.pread(self._descriptor, size, self._layout.ring_at + index * self._slot_bytes)
        if len(span) == size:
            return span
        self.problem = "truncated: it was cut while it was read"
        return span.ljust(size, b"\0")

    # --- bodies ---

    def _decoded(self, found: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        for _, body in found:
            value = _json_object(body)
            if value is None:
                self.skipped += 1
            else:
                yield value


def is_within_bounds(value: object) -> bool:
    """Return whether every number in a value of ``readings`` can be counted with: finite, not negative, of 63 bits."""
    if isinstance(value, int | float):
        return 0 <= value <= _MAX_NUMBER
    return all(is_within_bounds(getattr(value, name)) for name in getattr(type(value), "__slots__", ()))


def has_magic(path: Path) -> bool:
    """Return whether it is a regular file that begins as a ring does, of whatever version.

    Raises:
        RingUnusable: It cannot be opened.
    """
    descriptor = _open(path)
    try:
        return os.pread(descriptor, len(MAGIC), 0) == MAGIC
    except OSError as exc:
        raise RingUnusable(_unreadable(exc)) from exc
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return open_regular(path)
    except NotARegularFileError as exc:
        raise RingUnusable("not a regular file") from exc
    except OSError as exc:
        raise RingUnusable(_unreadable(exc)) from exc


def _header(descriptor: int, status: os.stat_result) -> tuple[_Layout, bytes]:
    """Return the places of the parts, and the identity as it is written there."""
    if status.st_size > MAX_FILE_BYTES:
        raise RingUnusable(f"too large: {status.st_size} bytes")
    start = os.pread(descriptor, _MAX_HEADER_BYTES, 0)
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise RingUnusable("foreign: it does not begin as a ring does")
    version_at = len(MAGIC)
    if (
        len(start) >= version_at + 2
        and (version := int.from_bytes(start[version_at : version_at + 2], "little")) != VERSION
    ):
        raise RingUnusable(f"version {version} unknown")
    if len(start) < _HEADER.size:
        raise RingUnusable(f"truncated: {status.st_size} bytes")
    _, _, header_bytes, slot_bytes, slots, heartbeat_bytes, table_bytes, stack_bytes, length, checksum = (
        _HEADER.unpack_from(start)
    )
    layout = _Layout(
        header_bytes=header_bytes,
        slot_bytes=slot_bytes,
        slots=slots,
        heartbeat_bytes=heartbeat_bytes,
        table_bytes=table_bytes,
        stack_bytes=stack_bytes,
    )
    if not layout.is_possible:
        areas = f"heartbeats of {heartbeat_bytes}, tables of {table_bytes}, stacks of {stack_bytes}"
        raise RingUnusable(f"corrupt header: {slots} slots of {slot_bytes} bytes after {header_bytes}, {areas}")
    if length > header_bytes - _HEADER.size:
        raise RingUnusable(f"corrupt identity: {length} bytes in a header of {header_bytes}")
    if status.st_size < header_bytes:
        raise RingUnusable(f"truncated: {status.st_size} bytes, less than its header")
    identity = start[_HEADER.size : _HEADER.size + length]
    if zlib.crc32(identity, zlib.crc32(start[:_CHECKED_HEADER_BYTES])) != checksum:
        raise RingUnusable("corrupt identity: its checksum does not fit")
    if status.st_size < layout.nbytes:
        raise RingUnusable(f"truncated: {status.st_size} bytes of {layout.nbytes}")
    return layout, identity


def _identity(content: bytes, name: str) -> Identity:
    given = _json_object(content)
    if given is None:
        raise RingUnusable("corrupt identity: it is no JSON object")
    try:
        identity = _IDENTITY.validate_python(given)
    except ValidationError as exc:
        raise RingUnusable(f"corrupt identity: {flaw(exc.errors(include_url=False, include_input=False))}") from exc
    device = identity.device
    if not is_within_bounds(device):
        raise RingUnusable("corrupt identity: a number that nothing has")
    if not all((text or "").isprintable() for text in (device.type, device.name)):
        raise RingUnusable("corrupt identity: device: characters that no name has")
    if name != f"highwater-{identity.instance}-{identity.pid}.ring":
        raise RingUnusable("corrupt identity: it is not that of the file's name")
    return identity


def _framed(span: bytes, offset: int) -> tuple[int, bytes] | None:
    """A record's number and body; ``None`` where its checksum does not fit."""
    sequence, length, checksum = _SLOT.unpack_from(span, offset)
    start = offset + _SLOT.size
    if not sequence or length > len(span) - start:
        return None
    body = span[start : start + length]
    if zlib.crc32(body, zlib.crc32(span[offset : offset + _CHECKED_SLOT_BYTES])) != checksum:
        return None
    return sequence, body


def _area_sequence(area: tuple[bytes, int]) -> int:
    return int(_SLOT.unpack_from(area[0])[0])


def _entry_table(body: bytes) -> EntryTable | None:
    if len(body) < _HEAD_LENGTH.size:
        return None
    (length,) = _HEAD_LENGTH.unpack_from(body)
    rows_at = _HEAD_LENGTH.size + length
    if rows_at > len(body) or (len(body) - rows_at) % _ROW.size:
        return None
    head = _json_object(body[_HEAD_LENGTH.size : rows_at])
    if head is None:
        return None
    try:
        found = _TABLE_HEAD.validate_python(head)
    except ValidationError:
        return None
    budget = found.budget if is_within_bounds(found.budget) else WorkerBudget()
    start = tuple(
        replace(phase, name=_short(phase.name), error=None if phase.error is None else _short(phase.error))
        for phase in found.start
        if is_within_bounds(phase)
    )
    notes = [Note(name=_short(note.name), reason=_short(note.reason)) for note in found.notes]
    try:
        # JSON can name halves of characters, which no response of ours could hold.
        json.dumps(found.engine_budget, ensure_ascii=False).encode()
        engine_budget = None if found.engine_budget is None else _ENGINE_BUDGET.validate_python(found.engine_budget)
    except UnicodeEncodeError:
        engine_budget = None
        notes.append(Note(name="engine_budget", reason="the file has none that can be read: a text is no Unicode"))
    except ValidationError as exc:
        engine_budget = None
        flaws = flaw(exc.errors(include_url=False, include_input=False))
        notes.append(Note(name="engine_budget", reason=f"the file has none that can be read: {flaws}"))
    return EntryTable(
        mono=found.mono,
        total=found.total,
        budget=budget,
        start=start,
        notes=tuple(notes),
        rows=body[rows_at:],
        engine_budget=engine_budget,
    )


def _short(text: str) -> str:
    return printable(text[:MAX_TEXT])


def _hash_text(name: bytes) -> str:
    text = name.rstrip(b"\0").decode("ascii", "replace")
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def _json_object(text: bytes) -> dict[str, Any] | None:
    """Return one JSON object in ASCII, as the contract has it; ``None`` where it is invalid."""
    try:
        value = _JSON.decode(str(text, "ascii"))
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deep for the parser
        return None
    return value if isinstance(value, dict) else None


def _unreadable(exc: OSError) -> str:
    return f"unreadable: {os_reason(exc)}"


def _sequence(record: tuple[int, bytes]) -> int:
    return record[0]
