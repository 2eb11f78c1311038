"""One worker's file: a ring of slots in the form of docs/recorder.md.

It refuses to map the file (whoever truncates a mapped file ends the process that touches it), to write through a link,
and to leave anything behind where the file cannot be made.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES = 4096
SLOT_BYTES = 2048
_MAGIC = b"HIGHWATR"
_VERSION = 1
_HEADER = struct.Struct("<8sHHIII")
_SLOT = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
MOST_BODY_BYTES = SLOT_BYTES - _SLOT.size - _CHECKSUM.size
MOST_IDENTITY_BYTES = HEADER_BYTES - _HEADER.size - _CHECKSUM.size
_READABLE_BY_ALL = 0o644


class Ring:
    """A file that holds the last records, oldest overwritten first. One thread writes.

    Args:
        path: Where it lies.
        descriptor: Of the open file; the ring closes it.
        slots: Records that it holds.
    """

    def __init__(self, path: Path, descriptor: int, slots: int) -> None:
        self.path = path
        self.slots = slots
        self._descriptor = descriptor
        self._written = 0

    @property
    def nbytes(self) -> int:
        """The whole file's size."""
        return _size(self.slots)

    def write(self, body: bytes) -> None:
        """Write one record over the oldest.

        Args:
            body: One JSON object in ASCII, at most `MOST_BODY_BYTES` long.

        Raises:
            OSError: It could not be written; the next one takes its number.
            ValueError: It is too long.
        """
        if len(body) > MOST_BODY_BYTES:
            raise ValueError(f"a record of {len(body)} bytes does not fit into a slot of {MOST_BODY_BYTES}")
        record = _checked(_SLOT.pack(self._written + 1, len(body)), body)
        position = HEADER_BYTES + self._written % self.slots * SLOT_BYTES
        done = os.pwrite(self._descriptor, record, position)
        if done != len(record):
            raise OSError(f"only {done} of {len(record)} bytes of a record were written to {self.path}")
        self._written += 1

    def is_there(self) -> bool:
        """Say whether the file still lies where it was put: a removed one can be written and never be found."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file and leave it to its readers; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # of a disk that is gone; there is nobody to tell
                os.close(descriptor)

    def discard(self) -> None:
        """Close the file and remove it: nothing will be written into it."""
        is_ours = self.is_there()
        self.close()
        if is_ours:
            with suppress(OSError):
                self.path.unlink()


def make_ring(path: Path, identity: bytes, slots: int) -> Ring:
    """Make a file with a header and empty slots, in its whole size, and put it in place of one of the same name.

    Args:
        path: Where it shall lie; its folder is made where there is none.
        identity: One JSON object in ASCII.
        slots: Records that it shall hold.

    Raises:
        OSError: It cannot be made, with the reason in words.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _make(path, _header(identity, slots), slots)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"the recorder's file {path} of {_size(slots)} bytes cannot be made: {reason}") from error


def _make(path: Path, header: bytes, slots: int) -> Ring:
    hidden = path.with_name(f".{path.name}.tmp")
    descriptor = _open_new(hidden)
    try:
        # Whatever the process's umask: the readers are other users in other containers.
        os.fchmod(descriptor, _READABLE_BY_ALL)
        os.posix_fallocate(descriptor, 0, _size(slots))
        os.pwrite(descriptor, header, 0)
        hidden.rename(path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            hidden.unlink()
        raise
    return Ring(path, descriptor, slots)


def _open_new(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, _READABLE_BY_ALL)
    except FileExistsError:
        # Left by a process that died here under our number, or put there for us to follow: it goes, whatever it points
        # to stays.
        path.unlink()
        return os.open(path, flags, _READABLE_BY_ALL)


def _header(identity: bytes, slots: int) -> bytes:
    if len(identity) > MOST_IDENTITY_BYTES:
        raise ValueError(f"an identity of {len(identity)} bytes does not fit into {MOST_IDENTITY_BYTES}")
    return _checked(_HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, SLOT_BYTES, slots, len(identity)), identity)


def _checked(head: bytes, body: bytes) -> bytes:
    return b"".join((head, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head))), body))


def _size(slots: int) -> int:
    return HEADER_BYTES + slots * SLOT_BYTES
