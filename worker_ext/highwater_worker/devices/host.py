"""Host memory as the worker's process sees it: its own resident size, its container's limit, its machine."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple

from highwater_worker.devices.cgroup import read_cgroup, read_oom_kills
from highwater_worker.errors import Notes
from highwater_worker.files import ROOT, read_start


class HostMemory(NamedTuple):
    """Host memory in bytes (kills: a count), None where it could not be read; the names are those of the response."""

    rss_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    node_total_bytes: int | None = None
    node_available_bytes: int | None = None
    cgroup_oom_kills: int | None = None  # processes of its container that the kernel has killed for memory

    @property
    def total_bytes(self) -> int | None:
        return min(
            (part for part in (self.cgroup_limit_bytes, self.node_total_bytes) if part is not None), default=None
        )

    @property
    def free_bytes(self) -> int | None:
        parts = [] if self.node_available_bytes is None else [self.node_available_bytes]
        if self.cgroup_limit_bytes is not None and self.cgroup_used_bytes is not None:
            parts.append(max(0, self.cgroup_limit_bytes - self.cgroup_used_bytes))
        return min(parts, default=None)


def read_host(notes: Notes, root: Path = ROOT) -> HostMemory:
    """Read host memory; what cannot be read is None and noted. No container limit is None without a note."""
    machine = notes.attempt("host_memory.node_total_bytes", lambda: read_machine(root)) or {}
    if machine and "available_bytes" not in machine:
        notes.add("host_memory.node_available_bytes", "/proc/meminfo has no MemAvailable")
    cgroup = notes.attempt("host_memory.cgroup_used_bytes", lambda: read_cgroup(root))
    return HostMemory(
        rss_bytes=notes.attempt("host_memory.rss_bytes", lambda: rss_bytes(root)),
        cgroup_used_bytes=cgroup.used_bytes if cgroup else None,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        node_total_bytes=machine.get("total_bytes"),
        node_available_bytes=machine.get("available_bytes"),
        cgroup_oom_kills=notes.attempt("host_memory.cgroup_oom_kills", lambda: read_oom_kills(root)),
    )


def rss_bytes(root: Path = ROOT) -> int:
    """Return the process's resident size; raises OSError where there is no /proc."""
    return int(read_start(f"{root}/proc/self/statm", mmap.PAGESIZE).split()[1]) * mmap.PAGESIZE


def read_machine(root: Path = ROOT) -> dict[str, int]:
    """Return the machine's `total_bytes` and `available_bytes`, if shown. Raises OSError where there is no /proc."""
    lines = [line.split() for line in read_start(f"{root}/proc/meminfo", 1024).decode("ascii").splitlines()]
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}
    names = {"MemTotal:": "total_bytes", "MemAvailable:": "available_bytes"}
    return {name: sizes[key] for key, name in names.items() if key in sizes}
