"""Reads one worker's recorder file while it is written, by docs/recorder-file.md; nothing in a file is trusted.

Only ``pread`` is used, never a mapping: a file that somebody truncates is then a short read and not the end of this
process. Nothing in a file makes a reader raise anything but ``RingUnusable``, or do more than a fixed amount of work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from highwater.process.errors import os_reason
from highwater.process.regular import NotARegularFileError, open_regular
from highwater.watch.recorder.contents import EntryTable, RingUnusable, json_object, parse_identity, parse_table
from highwater_worker.wire import (
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    RING_HEAD,
    RING_HEAD_BYTES,
    RING_MAGIC,
    RING_VERSION,
    Layout,
    checked_body,
    frame_body,
)

MAX_FILE_BYTES = 64 * 1024 * 1024
# What a header may claim, so that no file makes much work: the size of a header has two bytes anyway.
_MAX_HEADER_BYTES = 64 * 1024
_MIN_SLOT_BYTES, _MAX_SLOT_BYTES = 256, 64 * 1024
_MIN_AREA_BYTES = 256
_MAX_HEARTBEAT_BYTES, _MAX_TABLE_BYTES = 64 * 1024, 2 * 1024 * 1024
# The size of a heartbeat without a dump of stacks in it.
_SHORT_HEARTBEAT_BYTES = 2048
# The size of one pread: three seconds of a worker that samples ten times a second.
_WINDOW_BYTES = 64 * 1024
# How many damaged slots in a row may lie between two good ones and not be taken for the end.
_GAP_SLOTS = 4


class Ring:
    """One file, held open: a link is not followed, and a named pipe not waited for.

    ``inode`` is device and inode: another file under the same name has others. ``problem`` is what is wrong with it at
    present. The constructor raises RingUnusable where this version cannot read the file as a ring, other methods where
    it can no longer be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self._descriptor = _open(path)
        try:
            status = os.fstat(self._descriptor)
            self.inode = (status.st_dev, status.st_ino)
            self._layout, identity = _read_header(self._pread(0, _MAX_HEADER_BYTES), status.st_size)
            self._slot_bytes, self._slots = self._layout.slot_bytes, self._layout.slots
            self.identity = parse_identity(identity, path.name)
        except RingUnusable:
            self.close()
            raise
        self._window = min(max(_WINDOW_BYTES // self._slot_bytes, 1), self._slots)
        self._heartbeat = self._table = 0  # the sequence numbers of those that were returned last
        self._last = 0  # the highest sequence number seen
        self._cursor = 0  # where the next search for records that are not in their place begins

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self) -> Iterator[dict[str, Any]]:
        """Return the new records, newest first: where there are more than two windows of them, the newest.

        They are decoded one by one as the caller takes them: a worker writes ten a second, and a poll needs the newest.
        It takes one ``pread`` where the reader keeps up, two at the end of the file; damaged slots are skipped, and
        the slot that is being written is read next time.
        """
        records = self._new_records()
        if records:
            self._last = records[-1][0]
        return _decoded(reversed(records))

    def newest(self) -> Iterator[dict[str, Any]]:
        """Return all records, newest first, those too that were read before. Reads the whole file."""
        records: list[tuple[int, bytes]] = []
        for index in range(0, self._slots, self._window):
            records += self._records(index, min(self._window, self._slots - index), after=0)
        return _decoded(sorted(records, key=_sequence, reverse=True))

    def heartbeat(self) -> dict[str, Any] | None:
        size = self._layout.heartbeat_bytes
        newer = self._newer_of_two(self._layout.header_bytes, size, min(size, _SHORT_HEARTBEAT_BYTES), self._heartbeat)
        if newer is None:
            return None
        self._heartbeat, body = newer
        return json_object(body)

    def table(self) -> EntryTable | None:
        newer = self._newer_of_two(self._layout.tables_at, self._layout.table_bytes, FRAME_HEAD_BYTES, self._table)
        if newer is None:
            return None
        self._table, body = newer
        return parse_table(body)

    def _newer_of_two(self, at: int, size: int, first_bytes: int, last: int) -> tuple[int, bytes] | None:
        """Return number and body of the newer of two areas that are written in turn, if it is newer than ``last``."""
        starts = [(self._pread(start, first_bytes), start) for start in (at, at + size)]
        whole = [(content, start) for content, start in starts if len(content) == first_bytes]
        for content, start in sorted(whole, key=lambda area: FRAME_HEAD.unpack_from(area[0])[0], reverse=True):
            sequence, length = FRAME_HEAD.unpack_from(content)
            if sequence <= last or length > size - FRAME_HEAD_BYTES:
                continue
            needed = FRAME_HEAD_BYTES + length
            frame = content if needed <= first_bytes else self._pread(start, needed)
            record = frame_body(frame) if len(frame) >= needed else None
            if record is not None:  # else it is being written, and the other area is older and good
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
        records = self._records(self._last % self._slots, self._window, after=self._last)
        if not records:
            # None yet, or they are elsewhere after damage or a long pause: each call searches one more window.
            at_start = True
            records = self._records(self._cursor, self._window, after=self._last)
            self._cursor = (self._cursor + self._window) % self._slots
        if not records:
            return []
        records.sort(key=_sequence)
        highest = records[-1][0]
        if not at_start and highest < self._last + self._window:
            return records
        # The newest is found by halving: a good record is followed by the next or an older one.
        end, beyond = highest, highest + self._slots
        while beyond - end > 1:
            middle = (end + beyond) // 2
            if self._is_written(middle, beyond):
                end = middle
            else:
                beyond = middle
        first = max(end - self._window, self._last)
        latest = self._records(first % self._slots, self._window, after=first)
        # Records that were found by a search may be from anywhere in the ring.
        return sorted(latest if at_start else {*records, *latest}, key=_sequence)

    def _is_written(self, sequence: int, before: int) -> bool:
        for near in range(sequence, min(sequence + _GAP_SLOTS, before)):
            record = frame_body(self._span((near - 1) % self._slots, 1))
            if record is not None:
                return record[0] >= near
        return False

    # --- slots ---

    def _records(self, index: int, count: int, *, after: int) -> list[tuple[int, bytes]]:
        span, records = self._span(index, count), []
        for place in range(count):
            offset = place * self._slot_bytes
            if FRAME_HEAD.unpack_from(span, offset)[0] <= after:
                continue
            record = frame_body(span[offset : offset + self._slot_bytes])
            if record is not None and (record[0] - 1 - index - place) % self._slots == 0:
                records.append(record)
        return records

    def _span(self, index: int, count: int) -> bytes:
        """Return ``count`` slots; the first slot follows the last, and what the file lacks is zero."""
        until_end = min(count, self._slots - index)
        span = self._slots_from(index, until_end)
        return span if until_end == count else span + self._slots_from(0, count - until_end)

    def _slots_from(self, index: int, count: int) -> bytes:
        size = count * self._slot_bytes
        span = self._pread(self._layout.ring_at + index * self._slot_bytes, size)
        if len(span) == size:
            return span
        self.problem = "truncated: it was cut while it was read"
        return span.ljust(size, b"\0")


def has_magic(path: Path) -> bool:
    """Return if a regular file begins as a ring of any version does. Raises RingUnusable: it cannot be opened."""
    descriptor = _open(path)
    try:
        return os.pread(descriptor, len(RING_MAGIC), 0) == RING_MAGIC
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


def _read_header(start: bytes, file_bytes: int) -> tuple[Layout, bytes]:
    if file_bytes > MAX_FILE_BYTES:
        raise RingUnusable(f"too large: {file_bytes} bytes")
    if start[: len(RING_MAGIC)] != RING_MAGIC[: len(start)]:
        raise RingUnusable("foreign: it does not begin as a ring does")
    version = start[len(RING_MAGIC) : len(RING_MAGIC) + 2]
    if len(version) == 2 and int.from_bytes(version, "little") != RING_VERSION:  # noqa: PLR2004 - the version's two bytes
        raise RingUnusable(f"version {int.from_bytes(version, 'little')} unknown")
    if len(start) < RING_HEAD_BYTES:
        raise RingUnusable(f"truncated: {file_bytes} bytes")
    _, _, *sizes, length = RING_HEAD.unpack_from(start)
    layout = Layout(*sizes)
    is_possible = (
        layout.slots > 0
        and _MIN_SLOT_BYTES <= layout.slot_bytes <= _MAX_SLOT_BYTES
        and _MIN_AREA_BYTES <= layout.heartbeat_bytes <= _MAX_HEARTBEAT_BYTES
        and _MIN_AREA_BYTES <= layout.table_bytes <= _MAX_TABLE_BYTES
    )
    if not is_possible:
        raise RingUnusable(
            f"corrupt header: {layout.slots} slots of {layout.slot_bytes} bytes after {layout.header_bytes}, "
            f"heartbeats of {layout.heartbeat_bytes}, tables of {layout.table_bytes}"
        )
    if length > layout.header_bytes - RING_HEAD_BYTES:
        raise RingUnusable(f"corrupt identity: {length} bytes in a header of {layout.header_bytes}")
    if file_bytes < layout.header_bytes:
        raise RingUnusable(f"truncated: {file_bytes} bytes, less than its header")
    identity = checked_body(start, RING_HEAD.size, length)
    if identity is None:
        raise RingUnusable("corrupt identity: its checksum does not fit")
    if file_bytes < layout.nbytes:
        raise RingUnusable(f"truncated: {file_bytes} bytes of {layout.nbytes}")
    return layout, identity


def _decoded(records: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
    return (value for _, body in records if (value := json_object(body)) is not None)


def _unreadable(exc: OSError) -> str:
    return f"unreadable: {os_reason(exc)}"


def _sequence(record: tuple[int, bytes]) -> int:
    return record[0]
