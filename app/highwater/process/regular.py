"""Files that others wrote, opened without following a link, waiting for a pipe or opening a device; their folders.

And files for their owner alone: replaced in one step, and read only where no other user could have read or written
them. Such a file is written beside its place under a name that nobody can guess: a crash leaves the old or the new one
whole, and a link or file that somebody put there is replaced and never written through.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from itertools import islice
from pathlib import Path

_ROOT = 0


class NotARegularFileError(OSError):
    """The path names a link, a folder, a pipe or a device."""

    def __init__(self) -> None:
        super().__init__("it is not a file")


class FileTooLargeError(OSError):
    """The file has more bytes than its reader allows."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"it has more than {max_bytes:,} bytes")


class NotPrivate(Exception):
    """Another user can read the file, or could have written it. The message says which, and what would be right."""


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


# --- private ---


def replace_private(path: Path, content: bytes) -> None:
    """Write the whole file, mode 0600, on the disk when this returns. Its folder must exist; a link is replaced.

    Raises OSError where it could not be written; the former file still stands.
    """
    # mkstemp opens with O_CREAT, O_EXCL and O_NOFOLLOW, and with mode 0600.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".draft", dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a file system that does not know this for folders
            raise
    finally:
        os.close(folder)


def read_private(path: Path, *, max_bytes: int) -> bytes:
    """Read a secret that is this user's or root's, and that no other user can read.

    The rule is PostgreSQL's for keys: mode 0600 at most, or 0640 where root owns the file, as a mounted Kubernetes
    Secret has. A link is followed if this user or root made it: Kubernetes swaps Secrets by such links.

    Raises:
        NotPrivate: It is not private, not a file, or larger than ``max_bytes``.
        OSError: It cannot be read; ``FileNotFoundError`` where it does not exist.
    """
    try:
        status = path.lstat()
        if is_link := stat.S_ISLNK(status.st_mode):
            _check_owner(status)
        descriptor = open_regular(path, follows_link=is_link)
    except NotARegularFileError as exc:
        raise NotPrivate("is not a file") from exc
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _check_owner(found)
        others = 0o037 if found.st_uid == _ROOT else 0o077
        if found.st_mode & others:
            mode = stat.S_IMODE(found.st_mode)
            raise NotPrivate(f"can be read by other users (mode {mode:04o}); chmod 600 it")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise NotPrivate(f"has more than {max_bytes} bytes")
    return content


def _check_owner(found: os.stat_result) -> None:
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise NotPrivate(f"belongs to user {found.st_uid}, not to user {os.geteuid()} or root")
