"""Files for their owner alone: replaced in one step, and read only where no other user could have read or written them.

A file is written beside its place under a name that nobody can guess: a crash leaves the old or the new one whole, and
a link or file that somebody put there is replaced and never written through.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from highwater.files.regular import NotARegularFileError, open_regular

_ROOT = 0


class NotPrivate(Exception):
    """Another user can read the file, or could have written it. The message says which, and what would be right."""


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
    _sync_folder(path.parent)


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a file system that does not know this for folders
            raise
    finally:
        os.close(descriptor)
