"""Files for other processes to read: whole or absent, on which file system, and removed when their writers are gone."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

ROOT = Path("/")
"""The default of every `root`: the file system's root, which a test replaces by a folder of its own."""


@contextmanager
def new_file(path: Path, mode: int) -> Iterator[int]:
    """Open a new file that replaces the one at a path once the block ends, or leaves nothing where it raises.

    The mode is the file's, whatever the process's umask; a link at the path is replaced, not followed. Yields a
    descriptor to read and write by, which the caller closes, except where the block raises. Raises OSError: it cannot
    be made.
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
        # Left by a process of the same number that died here, or a link put there: it goes, and its target stays.
        path.unlink()
        return os.open(path, flags, 0o600)


encode_json = json.JSONEncoder(allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode


def encoded(record: dict[str, Any]) -> bytes:
    return encode_json(record).encode("ascii")


_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_REMOTE = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "ocfs2"),
        *("gfs2", "autofs"),  # to touch autofs mounts it
    )
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    group: str  # the directory of the file system that is mounted; of a cgroup file system, a group
    point: str
    kind: str
    options: str


def read_mounts(root: Path = ROOT) -> Iterator[Mount]:
    """Yield the mounted file systems; of several on one point the last one lies on top."""
    for line in lines_of(root / "proc/self/mountinfo"):
        # id parent major:minor group mount-point options [tags] - kind source options (proc_pid_mountinfo(5))
        before, _, after = line.partition(" - ")
        place, rest = before.split(), after.split()
        if len(place) > 4 and rest:  # noqa: PLR2004 - the fields read below
            point = _ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), place[4])
            yield Mount(place[3], point, rest[0], rest[2] if len(rest) > 2 else "")  # noqa: PLR2004 - as above


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux, not mounted, or not readable: as if absent
        return []


def read_start(path: str, limit: int) -> bytes:
    """Return a file's first bytes with three system calls (a file object makes seven); raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def checked(head: bytes, body: bytes) -> bytes:
    return b"".join((head, struct.pack("<I", zlib.crc32(body, zlib.crc32(head))), body))


class OpenFile:
    """A file that is written until its process ends, and that readers find by its path."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        # No write may go into a descriptor that was closed, and is another file's by now.
        self._lock = Lock()

    def is_there(self) -> bool:
        """Return whether the file is still in its place: a removed file can be written and never be found."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def close(self, *, removes: bool = False) -> None:
        """Close the file and leave it to its readers, or remove it from its place; a second call does nothing."""
        is_removed = removes and self.is_there()
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        with suppress(OSError):  # the disk is unreachable; there is nowhere to report it
            if descriptor >= 0:
                os.close(descriptor)
        with suppress(OSError):
            if is_removed:
                self.path.unlink()

    def leave(self) -> None:
        """Close it in a forked child, and leave it to the parent, a thread of which may have held the lock then."""
        self._lock = Lock()
        self.close()

    def _pwrite(self, content: bytes, position: int) -> None:
        with self._lock:
            done = os.pwrite(self._descriptor, content, position)
        if done != len(content):
            raise OSError(f"only {done} of {len(content)} bytes were written to {self.path}")


def file_system_of(path: Path, root: Path = ROOT) -> str | None:
    """Return the type of the file system that an absolute path lies on, None where the kernel does not show it.

    The path need not exist, and is not touched: an unreachable server would hold the caller. So links on the way are
    not followed.
    """
    wanted, best, kind = os.path.normpath(path) + "/", -1, None
    for mount in read_mounts(root):
        if len(mount.point) >= best and wanted.startswith(mount.point.rstrip("/") + "/"):
            best, kind = len(mount.point), mount.kind
    return kind


def is_in_memory(kind: str | None) -> bool:
    """Return whether a write waits for no disk."""
    return kind in _IN_MEMORY


def is_remote(kind: str | None) -> bool:
    """Return whether a call may wait for another machine, or for another process, without a bound."""
    return kind is not None and (kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE))


_RING = re.compile(r"\.?highwater-([0-9a-f]{16})-[0-9]{1,10}\.ring(?:\.tmp)?", re.ASCII)
_SILENT_SECONDS = 60.0  # a recorder writes once a second at least
_SILENT_SECONDS_WITHOUT_ROOM = 5.0
KEPT_STARTS = 8
_MAX_SCANNED = 1024


def remove_silent(directory: Path, suffix: str, before: float) -> None:
    """Remove files of this package that end with a suffix and were last written before a time in Unix seconds.

    What cannot be removed stays, and so does what lies behind the first 1,024 files.
    """
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in islice(entries, _MAX_SCANNED):
            with suppress(OSError):
                is_ours = entry.name.startswith("highwater-") and entry.name.endswith(suffix)
                if is_ours and entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)


def remove_old_rings(
    directory: Path, instance: str, *, has_room: bool = True, clock: Callable[[], float] = time.time
) -> None:
    """Remove the recorder files of silent starts but for the last ones; what cannot be removed stays.

    A sidecar removes them ten minutes after their writers fell silent. Where none runs, an engine that crashes again
    and again would fill a file system in memory with them. None of the start under way (`instance`) is removed; without
    room for another file, no silent start is kept. The folder may be missing. `clock` is Unix seconds.
    """
    starts: dict[str, list[tuple[float, str]]] = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            name = _RING.fullmatch(entry.name)
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if name is not None and name[1] != instance and stat.S_ISREG(status.st_mode):
                    starts.setdefault(name[1], []).append((status.st_mtime, entry.path))
    before = clock() - (_SILENT_SECONDS if has_room else _SILENT_SECONDS_WITHOUT_ROOM)
    silent = sorted((max(files), files) for files in starts.values() if max(files)[0] < before)
    for _, files in silent[:-KEPT_STARTS] if has_room else silent:
        for _, path in files:
            with suppress(OSError):
                os.unlink(path)
