"""Files that others wrote: opened without following a link, waiting for a pipe or touching a device."""

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

    Args:
        path: Its path.
        follows_link: Whether a link may stand there: an operator's own path may be one, a foreign file's never.

    Raises:
        NotARegularFileError: It is something else, or a link.
        OSError: It cannot be opened.
    """
    # Looked at before it is opened: opening a device can do something.
    if not stat.S_ISREG(os.stat(path, follow_symlinks=follows_link).st_mode):
        raise NotARegularFileError
    # And again after it: what stands there may be another by now. Without O_NONBLOCK a named pipe would wait.
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
