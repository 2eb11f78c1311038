"""One worker's flight recorder, read as foreign bytes while it is written. docs/recorder.md is the contract.

Only ``pread`` is used, never a mapping: a file that somebody truncates is then a short answer and not the end of this
process. Nothing in a file makes a reader raise anything but ``RingUnusable``, or do more than a fixed amount of work.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from app.readings import Device, WorkerBudget
from app.table import rank_title

VERSION = 1
MAGIC = b"HIGHWATR"
RING_NAME = re.compile(r"highwater-([0-9a-f]{16})-([0-9]{1,10})\.ring", re.ASCII)

FILE_BYTES_MOST = 64 * 1024 * 1024
# What a header may claim, so that no file makes much work: the size of a header has two bytes anyway.
_HEADER_BYTES_MOST = 64 * 1024
_SLOT_BYTES_LEAST, _SLOT_BYTES_MOST = 256, 64 * 1024
# What one pread asks for: three seconds of a worker that samples ten times a second.
_WINDOW_BYTES = 64 * 1024
# How many damaged slots in a row may lie between two good ones and not be taken for the end.
_GAP_SLOTS = 4
# Of what is told as a number: beyond it, sums in floats and in C would go wrong elsewhere.
_NUMBER_MOST = 2**63 - 1

_HEADER = struct.Struct("<8sHHIIII")
_CHECKED_HEADER_BYTES = 24
_SLOT = struct.Struct("<QII")
_CHECKED_SLOT_BYTES = 12

_Count: TypeAlias = Annotated[int, Field(ge=0, le=_NUMBER_MOST)]
# Names come into logs and sentences for operators: no control characters.
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
    """Who writes a ring; names and meanings are those of the worker's answers (worker_ext/README.md).

    Attributes:
        instance: One life of the engine, as the sidecar named it.
        pid: As the writer's own PID namespace numbers it.
        pid_started: Field 22 of ``/proc/<pid>/stat``: tells a process from a later one with its number.
        boot_id: Of the writer's kernel.
        started_at: Unix seconds.
        rate: Samples in a second.
        seconds: How long the ring reaches back.
        extension: The version of the worker extension.
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
    budget: WorkerBudget = field(default_factory=WorkerBudget)
    started_at: _Seconds
    rate: Annotated[float, Field(gt=0, le=10_000)]
    seconds: _Seconds
    extension: _Word | None = None

    @property
    def name(self) -> str:
        """The rank as an operator calls it: ``rank 1 (pid 4243 on node-a)``."""
        where = f" on {self.host}" if self.host else ""
        return f"rank {rank_title(self.dp_rank, self.rank)} (pid {self.pid}{where})"


_IDENTITY = TypeAdapter(Identity)


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
            self._header_bytes, self._slot_bytes, self._slots, identity = _header(self._descriptor, status)
            self.identity = _identity(identity, path.name)
        except OSError as exc:
            self.close()
            raise RingUnusable(_unreadable(exc)) from exc
        except RingUnusable:
            self.close()
            raise
        self._window = min(max(_WINDOW_BYTES // self._slot_bytes, 1), self._slots)
        self._last = 0  # the highest sequence number seen
        self._cursor = 0  # where the next look for records that are not where they should be begins

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> list[dict[str, Any]]:
        """The new records, oldest first: where there are more than two windows of them, the newest.

        One ``pread`` where the reader keeps up, two at the end of the file; damaged slots are passed by, and one that
        is being written is read next time.

        Raises:
            RingUnusable: It cannot be read any more.
        """
        try:
            found = self._new_records()
        except OSError as exc:
            raise RingUnusable(_unreadable(exc)) from exc
        if not found:
            return []
        newest = found[-1][0]
        if self._last:
            self.skipped += newest - self._last - len(found)
        self._last = newest
        return self._decoded(found)

    def newest(self, records_most: int) -> list[dict[str, Any]]:
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
        return self._decoded(found[-records_most:])

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
            record = self._record(self._span((near - 1) % self._slots, 1), 0)
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
            record = self._record(span, offset)
            if record is not None and (record[0] - 1 - index - place) % self._slots == 0:
                found.append(record)
        return found

    def _record(self, span: bytes, offset: int) -> tuple[int, bytes] | None:
        sequence, length, checksum = _SLOT.unpack_from(span, offset)
        if not sequence or length > self._slot_bytes - _SLOT.size:
            return None
        start = offset + _SLOT.size
        body = span[start : start + length]
        if zlib.crc32(body, zlib.crc32(span[offset : offset + _CHECKED_SLOT_BYTES])) != checksum:
            return None
        return sequence, body

    def _span(self, index: int, count: int) -> bytes:
        """So many slots from one on, going on at the first after the last; what the file lacks is zero."""
        until_end = min(count, self._slots - index)
        span = self._pread(index, until_end)
        return span if until_end == count else span + self._pread(0, count - until_end)

    def _pread(self, index: int, count: int) -> bytes:
        size = count * self._slot_bytes
        span = os.pread(self._descriptor, size, self._header_bytes + index * self._slot_bytes)
        if len(span) == size:
            return span
        self.problem = "truncated: it was cut while it was read"
        return span.ljust(size, b"\0")

    # --- bodies ---

    def _decoded(self, found: list[tuple[int, bytes]]) -> list[dict[str, Any]]:
        bodies = [value for _, body in found if (value := _json_object(body)) is not None]
        self.skipped += len(found) - len(bodies)
        return bodies


def is_within_bounds(value: object) -> bool:
    """Whether every number in a value of ``readings`` can be counted with: finite, not negative, of 63 bits."""
    if isinstance(value, int | float):
        return 0 <= value <= _NUMBER_MOST
    return all(is_within_bounds(getattr(value, name)) for name in getattr(type(value), "__slots__", ()))


def has_magic(path: Path) -> bool:
    """Whether it is a regular file that begins as a ring does, of whatever version.

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
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        # Looked at before it is opened: opening a device can do something.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise RingUnusable("not a regular file")
        descriptor = os.open(path, flags)
    except OSError as exc:
        raise RingUnusable("not a regular file" if exc.errno == errno.ELOOP else _unreadable(exc)) from exc
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RingUnusable("not a regular file")
    return descriptor


def _header(descriptor: int, status: os.stat_result) -> tuple[int, int, int, bytes]:
    """Header size, slot size, number of slots, and the identity as it stands there."""
    if status.st_size > FILE_BYTES_MOST:
        raise RingUnusable(f"too large: {status.st_size} bytes")
    start = os.pread(descriptor, _HEADER_BYTES_MOST, 0)
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise RingUnusable("foreign: it does not begin as a ring does")
    if len(start) < _HEADER.size:
        raise RingUnusable(f"truncated: {status.st_size} bytes")
    _, version, header_bytes, slot_bytes, slots, length, checksum = _HEADER.unpack_from(start)
    if version != VERSION:
        raise RingUnusable(f"version {version} unknown")
    if not slots or not _SLOT_BYTES_LEAST <= slot_bytes <= _SLOT_BYTES_MOST:
        raise RingUnusable(f"corrupt header: {slots} slots of {slot_bytes} bytes after {header_bytes}")
    if length > header_bytes - _HEADER.size:
        raise RingUnusable(f"corrupt identity: {length} bytes in a header of {header_bytes}")
    if status.st_size < header_bytes:
        raise RingUnusable(f"truncated: {status.st_size} bytes, less than its header")
    identity = start[_HEADER.size : _HEADER.size + length]
    if zlib.crc32(identity, zlib.crc32(start[:_CHECKED_HEADER_BYTES])) != checksum:
        raise RingUnusable("corrupt identity: its checksum does not fit")
    size = header_bytes + slots * slot_bytes
    if status.st_size < size:
        raise RingUnusable(f"truncated: {status.st_size} bytes of {size}")
    return header_bytes, slot_bytes, slots, identity


def _identity(content: bytes, name: str) -> Identity:
    given = _json_object(content)
    if given is None:
        raise RingUnusable("corrupt identity: it is no JSON object")
    try:
        identity = _IDENTITY.validate_python(given)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RingUnusable(f"corrupt identity: {where}: {first['msg']}") from exc
    device = identity.device
    if not is_within_bounds(device) or not is_within_bounds(identity.budget):
        raise RingUnusable("corrupt identity: a number that nothing has")
    if not all((text or "").isprintable() for text in (device.type, device.name)):
        raise RingUnusable("corrupt identity: device: characters that no name has")
    if name != f"highwater-{identity.instance}-{identity.pid}.ring":
        raise RingUnusable("corrupt identity: it is not that of the file's name")
    return identity


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def _json_object(text: bytes) -> dict[str, Any] | None:
    """What the contract calls one JSON object in ASCII; ``None`` where it is none."""
    try:
        value = _JSON.decode(str(text, "ascii"))
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deep for the parser
        return None
    return value if isinstance(value, dict) else None


def _unreadable(exc: OSError) -> str:
    return f"unreadable: {(exc.strerror or str(exc)).lower()}"


def _sequence(record: tuple[int, bytes]) -> int:
    return record[0]
