"""The folder of the workers' memory snapshots: they are listed, opened, and removed when newer ones exist.

Others may write into the folder: nothing is opened or removed but regular files with a name of ours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from highwater.accounting.rank_key import rank_key
from highwater.errors import Refused
from highwater.files.regular import first_names, open_regular, status_of

KEPT = 4
# Unfinished files are removed after so long: their workers have died.
UNFINISHED_SECONDS = 3600.0
MAX_ENTRIES = 10_000
FILE_NAME = re.compile(
    r"highwater-snapshot-(?P<snapshot>[0-9]{8}T[0-9]{9}Z)"
    r"-(?P<dp_rank>[0-9]{1,6}|x)-(?P<rank>[0-9]{1,6}|x)-(?P<pid>[0-9]{1,10})\.pickle"
)
_UNFINISHED = re.compile(rf"\.{FILE_NAME.pattern}\.tmp")

log = logging.getLogger("highwater.snapshots")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    name: str
    snapshot: str  # the part of the name that the files of one request share
    dp_rank: int | None  # from the name; `None` where the worker did not know it, as `rank`
    rank: int | None
    pid: int
    bytes: int
    written_at: float  # Unix seconds


class SnapshotFolder:
    """The files of all engines that write into ``folder``, if there is one; ``clock`` returns Unix seconds."""

    def __init__(self, folder: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock

    # --- the folder ---

    async def listed(self) -> tuple[list[SnapshotFile], str | None]:
        return await asyncio.to_thread(self._listed)

    async def open(self, name: str) -> tuple[BinaryIO, int] | None:
        """Return an open file, which the caller closes, and its size. Raises Refused: our user may not read it."""
        if self.folder is None or FILE_NAME.fullmatch(name) is None:
            return None
        return await asyncio.to_thread(_opened, self.folder / name)

    def _listed(self) -> tuple[list[SnapshotFile], str | None]:
        try:
            files = [file for name in self._names() if (file := self._snapshot_file(name)) is not None]
        except FileNotFoundError:  # nothing was written yet
            return [], None
        except OSError as exc:
            return [], f"recorder_dir: {self.folder} cannot be listed: {exc.strerror or exc}"
        files.sort(key=lambda file: (*rank_key(file), file.pid))
        files.sort(key=lambda file: file.snapshot, reverse=True)
        return files, None

    def _names(self) -> list[str]:
        return [] if self.folder is None else first_names(self.folder, MAX_ENTRIES)

    def _snapshot_file(self, name: str) -> SnapshotFile | None:
        match = FILE_NAME.fullmatch(name)
        status = self._regular(name) if match is not None else None
        if match is None or status is None:
            return None
        return SnapshotFile(
            name=name,
            snapshot=match["snapshot"],
            dp_rank=_rank(match["dp_rank"]),
            rank=_rank(match["rank"]),
            pid=int(match["pid"]),
            bytes=status.st_size,
            written_at=status.st_mtime,
        )

    def _regular(self, name: str) -> os.stat_result | None:
        status = status_of(f"{self.folder}/{name}")
        return status if status is not None and stat.S_ISREG(status.st_mode) else None

    def remove_older(self, newest: str) -> None:
        """Keep this and the newest of the others; by name, so that a clock set back does not cost the new one."""
        files, _ = self._listed()
        others = sorted({file.snapshot for file in files} - {newest}, reverse=True)
        kept = {newest, *others[: KEPT - 1]}
        gone = [file.name for file in files if file.snapshot not in kept]
        for name in (*gone, *self._unfinished()):
            try:
                os.unlink(f"{self.folder}/{name}")
            except FileNotFoundError:
                continue
            except OSError as exc:
                log.warning("recorder_dir: %s/%s could not be removed: %s", self.folder, name, exc.strerror)

    def _unfinished(self) -> list[str]:
        before, names = self._clock() - UNFINISHED_SECONDS, list[str]()
        with suppress(OSError):
            names = [name for name in self._names() if _UNFINISHED.fullmatch(name)]
        return [name for name in names if (status := self._regular(name)) is not None and status.st_mtime < before]


def pieces(file: BinaryIO, size: int, most: int = 256 * 1024) -> Iterator[bytes]:
    with file:
        while size > 0 and (piece := file.read(min(size, most))):
            size -= len(piece)
            yield piece


def _rank(text: str) -> int | None:
    return None if text == "x" else int(text)


def _opened(path: Path) -> tuple[BinaryIO, int] | None:
    try:
        descriptor = open_regular(path)
    except PermissionError as exc:
        raise Refused(
            f"{path.name} may be read by the engine's user and by the folder's group, and the sidecar's user "
            f"({os.geteuid()}) is neither: run both as one user, or share a group (docs/http.md)"
        ) from exc
    except OSError:
        return None
    return os.fdopen(descriptor, "rb"), os.fstat(descriptor).st_size
