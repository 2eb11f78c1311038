"""The type of a path's file system, found without touching the path: an unreachable server would hold the caller."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ROOT = Path("/")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_REMOTE = frozenset(
    {
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb3",
            "smbfs",
            "afs",
            "ceph",
            "glusterfs",
            "lustre",
            "gpfs",
            "beegfs",
            "ocfs2",
            "gfs2",
        ),
        "autofs",  # touching it mounts it
    }
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


def file_system_of(path: Path, root: Path = _ROOT) -> str | None:
    """Return the type of the file system that a path lies on, None where the kernel does not show it.

    Links on the way are not followed: following one touches its target.

    Args:
        path: An absolute path; it need not be there.
        root: The file system's root; a test brings its own.
    """
    try:
        lines = (root / "proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    wanted, best, found = os.path.normpath(path), -1, None
    for line in lines:
        # id parent major:minor group mount-point options [tags] - kind source options (proc_pid_mountinfo(5))
        before, _, after = line.partition(" - ")
        place, rest = before.split(), after.split()
        if len(place) < 5 or not rest:  # noqa: PLR2004 - the fields read below
            continue
        point = _ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), place[4])
        # Of several on one point the last one listed lies on top.
        if len(point) >= best and (wanted + "/").startswith(point.rstrip("/") + "/"):
            best, found = len(point), rest[0]
    return found


def is_in_memory(kind: str | None) -> bool:
    """Return whether writing to it waits for no disk."""
    return kind in _IN_MEMORY


def is_remote(kind: str | None) -> bool:
    """Return whether it may wait for another machine, or for another process, without a bound."""
    return kind is not None and (kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE))
