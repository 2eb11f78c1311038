"""The files of earlier starts: kept for whoever asks why those ended, but not without end.

A sidecar removes them ten minutes after their writers fell silent. Where none runs, an engine that crashes again and
again would fill a file system in memory with them.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_NAME = re.compile(r"\.?highwater-([0-9a-f]{16})-[0-9]{1,10}\.ring(?:\.tmp)?", re.ASCII)
_SILENT_SECONDS = 60.0
"""A recorder writes once a second at least."""
_SILENT_SECONDS_WITHOUT_ROOM = 5.0
KEPT_STARTS = 8


def remove_old_files(
    directory: Path, instance: str, *, has_room: bool = True, clock: Callable[[], float] = time.time
) -> None:
    """Remove the files of silent starts but for the last ones; what cannot be removed stays.

    Args:
        directory: The recorders' folder; it may be missing.
        instance: The start that is under way: none of its files is removed.
        has_room: Whether there is room for another file; where there is none, no silent start is kept.
        clock: Unix seconds.
    """
    starts: dict[str, list[tuple[float, str]]] = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if found is not None and found[1] != instance and stat.S_ISREG(status.st_mode):
                    starts.setdefault(found[1], []).append((status.st_mtime, entry.path))
    before = clock() - (_SILENT_SECONDS if has_room else _SILENT_SECONDS_WITHOUT_ROOM)
    silent = sorted((max(files), files) for files in starts.values() if max(files)[0] < before)
    for _, files in silent[:-KEPT_STARTS] if has_room else silent:
        for _, path in files:
            with suppress(OSError):
                os.unlink(path)
