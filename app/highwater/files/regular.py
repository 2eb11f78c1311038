"""Files that others wrote, opened without following a link, waiting for a pipe or opening a device; their folders."""

from __future__ import annotations

import errno
import os
import stat
from itertools import islice
from pathlib import Path


class NotARegularFileError(OSError):
    """The path names a link, a folder, a pipe or a device."""

    def __init__(self) -> None:
        super().__init__("it is not a file")


class FileTooLargeError(OSError):
    """The file has more bytes than its reader allows."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"it has more than {max_bytes:,} bytes")


def open_regular(path: Path | str, *, follows_link: bool = False) -> int:
    """Open a regular file for reading, and return its descriptor.

    A link is followed only with ``follows_link``: an operator's own path may be one, a foreign file's never. Raises
    OSError; NotARegularFileError for something else, or a link.
    """
    # Checked before it is opened, because opening a device can have an effect; and again after that, because another
    # file may be there by then. Without O_NONBLOCK a named pipe would wait.
    if not stat.S_ISREG(os.stat(path, follow_symlinks=follows_link).st_mode):
        raise NotARegularFileError
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follows_link else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise NotARegularFileError from exc
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotARegularFileError
    return descriptor


def read_regular(
    path: Path | str, max_bytes: int, *, first_bytes: int | None = None, follows_link: bool = False
) -> bytes:
    """Read a regular file of at most ``max_bytes``, or its ``first_bytes``.

    Raises OSError; NotARegularFileError, FileTooLargeError.
    """
    with os.fdopen(open_regular(path, follows_link=follows_link), "rb") as file:
        if first_bytes is None:
            content = file.read(max_bytes + 1)
            is_too_large = len(content) > max_bytes
        else:
            content = file.read(first_bytes)
            is_too_large = os.fstat(file.fileno()).st_size > max_bytes
    if is_too_large:
        raise FileTooLargeError(max_bytes)
    return content


def signature(path: Path) -> tuple[int, ...]:
    """Return what changes with the file, its mode or its owner. Raises OSError where it cannot be found."""
    status = path.stat()
    return *stamp_of(status), status.st_ctime_ns


def stamp_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes when a file is written or replaced; the first two numbers identify the file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def status_of(path: Path | str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def first_names(folder: Path, max_names: int) -> list[str]:
    """Return a folder's first names: others may have written any number. Raises OSError where it cannot be listed."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, max_names)]
