"""Host memory as the worker's process sees it: its own resident size, its container's limit, its machine."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from highwater_worker.devices.cgroup import read_cgroup, read_oom_kills

if TYPE_CHECKING:
    from highwater_worker.notes import Notes

_ROOT = Path("/")


class HostMemory(NamedTuple):
    """Host memory in bytes (kills: a count), None where it could not be read; the names are those of the answer."""

    rss_bytes: int | None
    cgroup_used_bytes: int | None
    cgroup_limit_bytes: int | None
    node_total_bytes: int | None
    node_available_bytes: int | None
    cgroup_oom_kills: int | None = None
    """Processes of its container that the kernel has killed for memory."""

    @property
    def total_bytes(self) -> int | None:
        """The most that this process could have: its container's limit or the machine's memory, whichever is less."""
        return min(
            (part for part in (self.cgroup_limit_bytes, self.node_total_bytes) if part is not None), default=None
        )

    @property
    def free_bytes(self) -> int | None:
        """The bytes that this process could still get."""
        parts = [] if self.node_available_bytes is None else [self.node_available_bytes]
        if self.cgroup_limit_bytes is not None and self.cgroup_used_bytes is not None:
            parts.append(max(0, self.cgroup_limit_bytes - self.cgroup_used_bytes))
        return min(parts, default=None)


def read_host(notes: Notes, root: Path = _ROOT) -> HostMemory:
    """Read host memory; what cannot be read is None and noted. No container limit is None without a note.

    Args:
        notes: Gets the names of values that could not be read.
        root: The file system's root; a test brings its own.
    """
    meminfo = notes.attempt("host_memory.node_total_bytes", lambda: _meminfo(root)) or {}
    if meminfo and "MemAvailable" not in meminfo:
        notes.add("host_memory.node_available_bytes", "/proc/meminfo has no MemAvailable")
    cgroup = notes.attempt("host_memory.cgroup_used_bytes", lambda: read_cgroup(root))
    return HostMemory(
        rss_bytes=notes.attempt("host_memory.rss_bytes", lambda: rss_bytes(root)),
        cgroup_used_bytes=cgroup.used_bytes if cgroup else None,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        node_total_bytes=meminfo.get("MemTotal"),
        node_available_bytes=meminfo.get("MemAvailable"),
        cgroup_oom_kills=notes.attempt("host_memory.cgroup_oom_kills", lambda: read_oom_kills(root)),
    )


def rss_bytes(root: Path = _ROOT) -> int:
    """Return the process's resident size.

    Raises:
        OSError: There is no /proc.
    """
    # Not through Python's file objects: the recorder reads many times a second, and they make seven system calls.
    descriptor = os.open(f"{root}/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, mmap.PAGESIZE).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split() for line in (root / "proc/meminfo").read_text("ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}
