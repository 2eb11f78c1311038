"""Files that others wrote: opened without following a link, waiting for a pipe or opening a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotARegularFileError(OSError):
    """The path names a link, a folder, a pipe or a device."""

    def __init__(self) -> None:
        super().__init__("it is not a file")


def open_regular(path: Path | str, *, follows_link: bool = False) -> int:
    """Open a regular file for reading, and return its descriptor.

    A link is followed only with ``follows_link``: an operator's own path may be one, a foreign file's never.

    Raises:
        NotARegularFileError: It is something else, or a link.
        OSError: It cannot be opened.
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


def signature(path: Path) -> tuple[int, ...]:
    """Return what changes with the file, its mode or its owner.

    Raises:
        OSError: It cannot be found.
    """
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
