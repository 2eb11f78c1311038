"""One worker's file in the form of docs/recorder-file.md: header, heartbeat, entry table, ring of samples, stack area.

It refuses to map the file (a process that touches a mapped file after its truncation is killed), to write through a
link, and to leave anything behind where the file cannot be made.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

from highwater_worker.files import OpenFile, checked, new_file

HEADER_BYTES = 4096
SLOT_BYTES = 2048
HEARTBEAT_BYTES = 16 * 1024
STACK_BYTES = 64 * 1024
ROW = struct.Struct("<64sQdB7x")
"""One row of the entry table: mm_hash, bytes, when it was first seen (monotonic seconds), 1 in host memory."""
MAX_ROWS = 4096
_MAGIC = b"HIGHWATR"
_VERSION = 2
_HEADER = struct.Struct("<8sHHIIIIII")
_SLOT = struct.Struct("<QI")
_CHECKSUM_BYTES = 4
_FRAME_BYTES = _SLOT.size + _CHECKSUM_BYTES
_HEAD_LENGTH = struct.Struct("<I")
_STACK_HEAD = struct.Struct("<dd")
_NO_STACK = bytes(16)  # over the beginning of an older stack, so that none is there
_TABLE_HEAD_BYTES = 32 * 1024  # the bytes of an entry table besides its rows: its frame, and a JSON object
MAX_HEAD_BYTES = _TABLE_HEAD_BYTES - _FRAME_BYTES - _HEAD_LENGTH.size
MAX_BODY_BYTES = SLOT_BYTES - _FRAME_BYTES
MAX_HEARTBEAT_BYTES = HEARTBEAT_BYTES - _FRAME_BYTES
MAX_IDENTITY_BYTES = HEADER_BYTES - _HEADER.size - _CHECKSUM_BYTES
_READABLE_BY_ALL = 0o644


class Layout(NamedTuple):
    """The places of a file's parts: header, two heartbeats, two entry tables, the ring, the stack area."""

    slots: int  # in the ring
    rows: int  # in an entry table

    @property
    def table_bytes(self) -> int:
        return _TABLE_HEAD_BYTES + self.rows * ROW.size

    @property
    def tables_at(self) -> int:
        return HEADER_BYTES + 2 * HEARTBEAT_BYTES

    @property
    def ring_at(self) -> int:
        return self.tables_at + 2 * self.table_bytes

    @property
    def stack_at(self) -> int:
        """The offset of the stack area; it is the last part, because a long stack runs over the end of the file."""
        return self.ring_at + self.slots * SLOT_BYTES

    @property
    def nbytes(self) -> int:
        return self.stack_at + STACK_BYTES


class Options(NamedTuple):
    directory: Path
    instance: str
    rate: float
    seconds: float

    @property
    def slots(self) -> int:
        """The samples that the file holds: those of its rate, and one more a second for samples that cannot wait."""
        return math.ceil(self.seconds * (self.rate + 1))

    def layout(self, *, has_entries: bool) -> Layout:
        return Layout(self.slots, MAX_ROWS if has_entries else 0)

    def path(self, pid: int) -> Path:
        return self.directory / f"highwater-{self.instance}-{pid}.ring"


class Ring(OpenFile):
    """The open file. Each kind of write has one caller at a time: samples and tables, heartbeats, the stack's head.

    What is written is JSON in ASCII. Every write raises an OSError where it fails, and a ValueError where a record is
    too long.
    """

    def __init__(self, path: Path, descriptor: int, layout: Layout) -> None:
        super().__init__(path, descriptor)
        self.layout = layout
        self._written = self._heartbeats = self._tables = 0

    def write(self, body: bytes) -> None:
        """Write one sample, of at most `MAX_BODY_BYTES`, over the oldest; after a failure the next takes its number."""
        position = self.layout.ring_at + self._written % self.layout.slots * SLOT_BYTES
        self._write_frame(self._written + 1, body, MAX_BODY_BYTES, position)
        self._written += 1

    def write_heartbeat(self, body: bytes) -> None:
        """Write a heartbeat, of at most `MAX_HEARTBEAT_BYTES`, over the one before the last."""
        position = HEADER_BYTES + self._heartbeats % 2 * HEARTBEAT_BYTES
        self._write_frame(self._heartbeats + 1, body, MAX_HEARTBEAT_BYTES, position)
        self._heartbeats += 1

    def write_table(self, head: bytes, rows: bytes) -> None:
        """Write an entry table over the one before the last."""
        size = self.layout.table_bytes
        body = b"".join((_HEAD_LENGTH.pack(len(head)), head, rows))
        self._write_frame(self._tables + 1, body, size - _FRAME_BYTES, self.layout.tables_at + self._tables % 2 * size)
        self._tables += 1

    def clear_stack(self, mono: float, seconds: float) -> int:
        """Empty the stack area at a monotonic time, and return a descriptor whose next plain `write` begins in it.

        Unless it is cleared again, a stack is written there in so many seconds.
        """
        self._pwrite(_STACK_HEAD.pack(mono, seconds) + _NO_STACK, self.layout.stack_at)
        # Everything else is written with `pwrite`, which leaves the offset alone.
        os.lseek(self._descriptor, self.layout.stack_at + _STACK_HEAD.size, os.SEEK_SET)
        return self._descriptor

    def _write_frame(self, sequence: int, body: bytes, limit: int, position: int) -> None:
        if len(body) > limit:
            raise ValueError(f"a record of {len(body)} bytes does not fit into {limit}")
        self._pwrite(checked(_SLOT.pack(sequence, len(body)), body), position)


def make_ring(path: Path, identity: bytes, layout: Layout) -> Ring:
    """Make a file with a header and empty areas, in its whole size, and put it in place of one of the same name.

    The folder is made where it is missing. The identity is one JSON object in ASCII. Raises OSError with the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(identity) > MAX_IDENTITY_BYTES:
            raise ValueError(f"an identity of {len(identity)} bytes does not fit into {MAX_IDENTITY_BYTES}")
        sizes = (SLOT_BYTES, layout.slots, HEARTBEAT_BYTES, layout.table_bytes, STACK_BYTES)
        header = checked(_HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, *sizes, len(identity)), identity)
        # Readable by all: the readers are other users in other containers.
        with new_file(path, _READABLE_BY_ALL) as descriptor:
            os.posix_fallocate(descriptor, 0, layout.nbytes)
            os.pwrite(descriptor, header, 0)
        return Ring(path, descriptor, layout)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"the recorder's file {path} of {layout.nbytes} bytes cannot be made: {reason}") from error
