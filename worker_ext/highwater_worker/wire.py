"""The files that a worker's processes write for others to read: frames, checksums, places, who writes, who removes.

docs/recorder-file.md is the contract. A leaf without imports of ours, which the sidecar may import. It refuses to map a
file (a process that touches a mapped file after its truncation is killed), to write through a link, and to leave
anything behind where a file cannot be made.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

EXTENSION_VERSION = "0.1.0"
"""Of this package; every recorder file names it."""

# A recorder file.
HEADER_BYTES = 4096
SLOT_BYTES = 2048
HEARTBEAT_BYTES = 16 * 1024
ROW = struct.Struct("<64sQdB7x")
"""One row of the entry table: mm_hash, bytes, when it was first seen (monotonic seconds), 1 in host memory."""
MAX_ROWS = 4096
RING_MAGIC = b"HIGHWATR"
RING_VERSION = 3
RING_HEAD = struct.Struct("<8sHHIIIII")
"""Magic, version, the fields of `Layout`, and the length of the identity, which follows behind a checksum."""
FRAME_HEAD = struct.Struct("<QI")
"""The sequence number, from 1 on, and the length of what follows behind a checksum."""
HEAD_LENGTH = struct.Struct("<I")
"""The length of the JSON object that an entry table begins with; its rows follow."""
_CHECKSUM = struct.Struct("<I")
RING_HEAD_BYTES, FRAME_HEAD_BYTES = RING_HEAD.size + _CHECKSUM.size, FRAME_HEAD.size + _CHECKSUM.size
_TABLE_HEAD_BYTES = 32 * 1024  # the bytes of an entry table besides its rows: its frame, and a JSON object
MAX_HEAD_BYTES = _TABLE_HEAD_BYTES - FRAME_HEAD_BYTES - HEAD_LENGTH.size
MAX_BODY_BYTES = SLOT_BYTES - FRAME_HEAD_BYTES
MAX_HEARTBEAT_BYTES = HEARTBEAT_BYTES - FRAME_HEAD_BYTES
MAX_IDENTITY_BYTES = HEADER_BYTES - RING_HEAD_BYTES
RING_NAME = re.compile(r"highwater-([0-9a-f]{16})-([0-9]{1,10})\.ring", re.ASCII)
"""The groups are the instance and the writer's pid, as in `ring_name`."""

# A process file.
PROCESS_MAGIC = b"HWPROC01"
PROCESS_FILE_BYTES = 4096
PROCESS_SUFFIX = ".process"
PROCESS_NAME = re.compile(r"highwater-([0-9]{1,10})-([0-9]{1,20})\.process", re.ASCII)
"""The groups are the process's pid and its start, in ticks since boot."""
_PROCESS_HEAD = struct.Struct("<8sII")
MAX_PROCESS_BYTES = PROCESS_FILE_BYTES - _PROCESS_HEAD.size - _CHECKSUM.size

_READABLE_BY_ALL = 0o644  # the readers are other users in other containers
_STALE_SECONDS = 60.0  # a recorder writes once a second at least
_STALE_SECONDS_WITHOUT_ROOM = 5.0
KEPT_STARTS = 8
_MAX_SCANNED = 1024

encode_json = json.JSONEncoder(allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode


def ring_name(instance: str, pid: int | str) -> str:
    return f"highwater-{instance}-{pid}.ring"


def encoded(record: dict[str, Any]) -> bytes:
    return encode_json(record).encode("ascii")


def _checked(head: bytes, body: bytes) -> bytes:
    return b"".join((head, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head))), body))


def checked_body(content: bytes, head_bytes: int, length: int) -> bytes | None:
    """Return what follows a head and its checksum, None where that is wrong: perhaps a write is under way."""
    start = head_bytes + _CHECKSUM.size
    body, (checksum,) = content[start : start + length], _CHECKSUM.unpack_from(content, head_bytes)
    is_right = len(body) == length and zlib.crc32(body, zlib.crc32(content[:head_bytes])) == checksum
    return body if is_right else None


def frame_body(frame: bytes) -> tuple[int, bytes] | None:
    """Return the sequence number and the body of a frame of a recorder file, None of one that is empty or damaged."""
    sequence, length = FRAME_HEAD.unpack_from(frame)
    body = checked_body(frame, FRAME_HEAD.size, length) if sequence else None
    return None if body is None else (sequence, body)


@contextmanager
def new_file(path: Path, mode: int) -> Iterator[int]:
    """Open a new file that replaces the one at a path once the block ends, or leaves nothing where it raises.

    The mode is the file's, whatever the process's umask; a link at the path is replaced, not followed. Yields a
    descriptor to read and write by, which the caller closes, except where the block raises. Raises OSError: it cannot
    be made.
    """
    hidden = path.with_name(f".{path.name}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(hidden, flags, 0o600)
    except FileExistsError:
        # Left by a process of the same number that died here, or a link put there: it goes, and its target stays.
        hidden.unlink()
        descriptor = os.open(hidden, flags, 0o600)
    try:
        os.fchmod(descriptor, mode)
        yield descriptor
        hidden.rename(path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            hidden.unlink()
        raise


class OpenFile:
    """A file that is written until its process ends, and that readers find by its path."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        # No write may go into a descriptor that was closed, and is another file's by now.
        self._lock = Lock()

    def is_there(self) -> bool:
        """Return whether the file is still in its place: a removed file can be written and never be found."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def close(self, *, removes: bool = False) -> None:
        """Close the file and leave it to its readers, or remove it from its place; a second call does nothing."""
        is_removed = removes and self.is_there()
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        with suppress(OSError):  # the disk is unreachable; there is nowhere to report it
            if descriptor >= 0:
                os.close(descriptor)
        with suppress(OSError):
            if is_removed:
                self.path.unlink()

    def leave(self) -> None:
        """Close it in a forked child, and leave it to the parent, a thread of which may have held the lock then."""
        self._lock = Lock()
        self.close()

    def _pwrite(self, content: bytes, position: int) -> None:
        with self._lock:
            done = os.pwrite(self._descriptor, content, position)
        if done != len(content):
            raise OSError(f"only {done} of {len(content)} bytes were written to {self.path}")


# --- process files ---


class ProcessFile(OpenFile):
    """One process's file, rewritten in place with one system call; it is removed where its process ends in order."""

    _written = 1

    def write(self, body: bytes) -> None:
        """Write one JSON object in ASCII over the old; raises OSError, and ValueError over `MAX_PROCESS_BYTES`."""
        self._written += 1
        self._pwrite(_process_frame(self._written, body), 0)


def make_process_file(path: Path, body: bytes) -> ProcessFile:
    """Make a file with its first content; the folder is made where it is missing. Raises as `ProcessFile.write`."""
    frame = _process_frame(1, body)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, _READABLE_BY_ALL) as descriptor:
        os.pwrite(descriptor, frame, 0)
    return ProcessFile(path, descriptor)


def _process_frame(sequence: int, body: bytes) -> bytes:
    if len(body) > MAX_PROCESS_BYTES:
        raise ValueError(f"{len(body)} bytes do not fit into {MAX_PROCESS_BYTES}")
    head = _PROCESS_HEAD.pack(PROCESS_MAGIC, sequence & 0xFFFFFFFF, len(body))
    return _checked(head, body).ljust(PROCESS_FILE_BYTES, b"\0")


def process_body(content: bytes) -> bytes | None:
    """Return the body in a process file's bytes, None where the checksum is wrong. Raises ValueError for another file.

    A wrong one may be of a write under way: read again.
    """
    if len(content) < _PROCESS_HEAD.size + _CHECKSUM.size or not content.startswith(PROCESS_MAGIC):
        raise ValueError("it is no process file")
    _, _, length = _PROCESS_HEAD.unpack_from(content)
    return checked_body(content, _PROCESS_HEAD.size, length)


# --- recorder files ---


class Layout(NamedTuple):
    """The places of a file's parts: header, two heartbeats, two entry tables, the ring.

    The fields are in the header's order.
    """

    header_bytes: int
    slot_bytes: int
    slots: int  # in the ring
    heartbeat_bytes: int
    table_bytes: int

    @classmethod
    def of(cls, slots: int, rows: int) -> Layout:
        """Return the layout of this package's files, with so many rows in an entry table."""
        table_bytes = _TABLE_HEAD_BYTES + rows * ROW.size
        return cls(HEADER_BYTES, SLOT_BYTES, slots, HEARTBEAT_BYTES, table_bytes)

    @property
    def rows(self) -> int:
        return (self.table_bytes - _TABLE_HEAD_BYTES) // ROW.size

    @property
    def tables_at(self) -> int:
        return self.header_bytes + 2 * self.heartbeat_bytes

    @property
    def ring_at(self) -> int:
        return self.tables_at + 2 * self.table_bytes

    @property
    def nbytes(self) -> int:
        return self.ring_at + self.slots * self.slot_bytes


class Options(NamedTuple):
    directory: Path
    instance: str
    rate: float
    seconds: float

    def layout(self, *, has_entries: bool) -> Layout:
        """Return the layout for the samples of the rate, and one more a second for samples that cannot wait."""
        return Layout.of(math.ceil(self.seconds * (self.rate + 1)), MAX_ROWS if has_entries else 0)

    def path(self, pid: int) -> Path:
        return self.directory / ring_name(self.instance, pid)


class Ring(OpenFile):
    """The open file. Each kind of write has one caller at a time: samples and tables, heartbeats.

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
        body = b"".join((HEAD_LENGTH.pack(len(head)), head, rows))
        self._write_frame(
            self._tables + 1, body, size - FRAME_HEAD_BYTES, self.layout.tables_at + self._tables % 2 * size
        )
        self._tables += 1

    def _write_frame(self, sequence: int, body: bytes, limit: int, position: int) -> None:
        if len(body) > limit:
            raise ValueError(f"a record of {len(body)} bytes does not fit into {limit}")
        self._pwrite(_checked(FRAME_HEAD.pack(sequence, len(body)), body), position)


def make_ring(path: Path, identity: bytes, layout: Layout) -> Ring:
    """Make a file with a header and empty areas, in its whole size, and put it in place of one of the same name.

    The folder is made where it is missing. The identity is one JSON object in ASCII. Raises OSError with the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(identity) > MAX_IDENTITY_BYTES:
            raise ValueError(f"an identity of {len(identity)} bytes does not fit into {MAX_IDENTITY_BYTES}")
        header = _checked(RING_HEAD.pack(RING_MAGIC, RING_VERSION, *layout, len(identity)), identity)
        with new_file(path, _READABLE_BY_ALL) as descriptor:
            os.posix_fallocate(descriptor, 0, layout.nbytes)
            os.pwrite(descriptor, header, 0)
        return Ring(path, descriptor, layout)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"the recorder's file {path} of {layout.nbytes} bytes cannot be made: {reason}") from error


# --- files whose writers are gone ---


def remove_silent(directory: Path, suffix: str, before: float) -> None:
    """Remove files of this package that end with a suffix and were last written before a time in Unix seconds.

    What cannot be removed stays, and so does what lies behind the first 1,024 files.
    """
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in islice(entries, _MAX_SCANNED):
            with suppress(OSError):
                is_ours = entry.name.startswith("highwater-") and entry.name.endswith(suffix)
                if is_ours and entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)


def remove_old_rings(
    directory: Path, instance: str, *, has_room: bool = True, clock: Callable[[], float] = time.time
) -> None:
    """Remove the recorder files of silent starts but for the last ones; what cannot be removed stays.

    A sidecar removes them ten minutes after their writers fell silent. Where none runs, an engine that crashes again
    and again would fill a file system in memory with them. None of the start under way (`instance`) is removed; without
    room for another file, no silent start is kept. The folder may be missing. `clock` is Unix seconds.
    """
    starts: dict[str, list[tuple[float, str]]] = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            name = RING_NAME.fullmatch(entry.name.removeprefix(".").removesuffix(".tmp"))
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if name is not None and name[1] != instance and stat.S_ISREG(status.st_mode):
                    starts.setdefault(name[1], []).append((status.st_mtime, entry.path))
    before = clock() - (_STALE_SECONDS if has_room else _STALE_SECONDS_WITHOUT_ROOM)
    silent = sorted((max(files), files) for files in starts.values() if max(files)[0] < before)
    for _, files in silent[:-KEPT_STARTS] if has_room else silent:
        for _, path in files:
            with suppress(OSError):
                os.unlink(path)


# --- who writes ---

_STOP_SECONDS = 1.0  # the time that an end waits for the thread, which the disk may hold
NOT_ENDED = "has not ended within a second: the disk holds its thread, and it ends once let go"
_EARLY = 100
"""Above every priority that multiprocessing gives its own finalizers: they take down things still read here."""


class Writer:
    """A file's writer, whose `run` is the body of its thread and returns soon after `end`.

    A forked child of its process has the object and no thread.
    """

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._name = name
        self._stopped = Event()
        self._thread: Thread | None = None
        self._finalizer: Finalize[bool] | None = None

    def run(self) -> None:
        raise NotImplementedError

    def start_thread(self) -> None:
        """Raises RuntimeError where no thread can be started."""
        # A daemon: a thread that the disk holds must not hold the interpreter's end.
        thread = Thread(target=self.run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def end_with_process(self) -> None:
        # vLLM's processes are mostly multiprocessing's children, which run its finalizers, and `atexit` only where they
        # were spawned, not forked.
        atexit.register(self.end)
        self._finalizer = Finalize(None, self.end, exitpriority=_EARLY)

    def forget_process(self) -> None:
        """Undo `end_with_process`, whose lists keep this object."""
        atexit.unregister(self.end)
        if self._finalizer is not None:
            self._finalizer.cancel()

    def is_running(self) -> bool:
        return self._thread is not None and self.pid == os.getpid() and self._thread.is_alive()

    def end(self) -> bool:
        """End the thread, and return whether it has ended: one that the disk holds ends once it is let go."""
        self._stopped.set()
        if self._thread is None or not self.is_running():
            return True
        self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()
