"""Files that take their place whole: written beside it under a hidden name, then renamed."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def new_file(path: Path, mode: int) -> Iterator[int]:
    """Open a new file that replaces the one at a path once the block ends, or leaves nothing where it raises.

    Args:
        path: The file's place. A link there is replaced, not followed.
        mode: The new file's, whatever the process's umask.

    Yields:
        A descriptor to read and write by. The caller closes it, except where the block raises.

    Raises:
        OSError: The file cannot be made.
    """
    hidden = path.with_name(f".{path.name}.tmp")
    descriptor = _open_new(hidden)
    try:
        os.fchmod(descriptor, mode)
        yield descriptor
        hidden.rename(path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            hidden.unlink()
        raise


def _open_new(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        # Left by a process of our number that died here, or put there for us to follow: it goes, and its target stays.
        path.unlink()
        return os.open(path, flags, 0o600)
