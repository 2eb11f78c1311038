"""The file of one process: 4096 bytes, rewritten in place with one system call. docs/recorder.md is the contract."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

from highwater_worker.files import checked, is_at, new_file

MAGIC = b"HWPROC01"
FILE_BYTES = 4096
_HEAD = struct.Struct("<8sII")
_CHECKSUM_BYTES = 4
MAX_BODY_BYTES = FILE_BYTES - _HEAD.size - _CHECKSUM_BYTES
_READABLE_BY_ALL = 0o644


class ProcessFile:
    """The open file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._written = 1

    def write(self, body: bytes) -> None:
        """Write over the old content.

        Args:
            body: One JSON object in ASCII, at most `MAX_BODY_BYTES` long.

        Raises:
            OSError: It could not be written.
            ValueError: It is too long.
        """
        self._written += 1
        os.pwrite(self._descriptor, _framed(self._written, body), 0)

    def is_there(self) -> bool:
        """Return whether the file is still in its place."""
        return is_at(self.path, self._descriptor)

    def close(self, *, removes: bool) -> None:
        """Close the file, and remove it where its process ends in order; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with suppress(OSError):
            if removes and is_at(self.path, descriptor):
                os.unlink(self.path)
        with suppress(OSError):
            os.close(descriptor)


def make_process_file(path: Path, body: bytes) -> ProcessFile:
    """Make a file with its first content; the folder is made where it is missing. Raises as `ProcessFile.write`."""
    frame = _framed(1, body)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, _READABLE_BY_ALL) as descriptor:
        os.pwrite(descriptor, frame, 0)
    return ProcessFile(path, descriptor)


def _framed(sequence: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{len(body)} bytes do not fit into {MAX_BODY_BYTES}")
    return checked(_HEAD.pack(MAGIC, sequence & 0xFFFFFFFF, len(body)), body).ljust(FILE_BYTES, b"\0")
