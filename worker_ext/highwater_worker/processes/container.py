"""The container's memory as its kernel counts it: raw counters of either cgroup version, for a sidecar elsewhere.

The engine's container may not be the sidecar's: this is read where the engine runs, and made sense of where it is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from highwater_worker.devices.cgroup import UNLIMITED, group_files, lines_of, number_in
from highwater_worker.errors import printable

if TYPE_CHECKING:
    from highwater_worker.devices.cgroup import GroupFiles

_ROOT = Path("/")
_MAX_PATH = 160
# Of `memory.stat`. Version 1 counts a group's children only in those that begin with `total_`.
_STAT_2 = (
    "anon",
    "file",
    "shmem",
    "kernel",
    "kernel_stack",
    "pagetables",
    "percpu",
    "sock",
    "vmalloc",
    "slab",
    "slab_reclaimable",
    "zswap",
    "active_file",
    "inactive_file",
)
_STAT_1 = ("total_rss", "total_cache", "total_shmem", "total_active_file", "total_inactive_file")
_EVENTS = ("high", "max", "oom", "oom_kill", "oom_group_kill")


def read_container(root: Path = _ROOT) -> dict[str, Any] | None:
    """Return the counters of this process's own group and of the limit that it will meet first; None without groups.

    Args:
        root: The file system's root; a test brings its own.
    """
    files = group_files(root)
    if files is None:
        return None
    own, is_version_2 = files.levels[0], files.limit == "memory.max"
    found: dict[str, Any] = {
        "version": 2 if is_version_2 else 1,
        "inode": _inode(own),
        "path": printable(_path(root, is_version_2=is_version_2), _MAX_PATH),
        "used": number_in(own / files.usage),
        "stat": _counters(own / "memory.stat", _STAT_2 if is_version_2 else _STAT_1),
    }
    found.update(_version_2(own) if is_version_2 else _version_1(own))
    found.update(_tightest(files))
    return {name: value for name, value in found.items() if value is not None}


def _version_2(own: Path) -> dict[str, Any]:
    return {
        "peak": number_in(own / "memory.peak"),
        "swap": number_in(own / "memory.swap.current"),
        "swap_limit": number_in(own / "memory.swap.max"),
        "events": _counters(own / "memory.events", _EVENTS),
        "pressure": read_pressure(own / "memory.pressure"),
    }


def _version_1(own: Path) -> dict[str, Any]:
    events = _counters(own / "memory.oom_control", _EVENTS)
    refused = number_in(own / "memory.failcnt")
    if refused is not None:
        events["max"] = refused
    return {
        "peak": number_in(own / "memory.max_usage_in_bytes"),
        "kernel": number_in(own / "memory.kmem.usage_in_bytes"),
        "sock": number_in(own / "memory.kmem.tcp.usage_in_bytes"),
        "swap": _counters(own / "memory.stat", ("total_swap",)).get("total_swap"),
        "events": events,
    }


def _tightest(files: GroupFiles) -> dict[str, Any]:
    """Return the limit with the least room, from the own group upwards, and what its group must keep."""
    names: tuple[str, ...] = ("inactive_file", "active_file", "slab_reclaimable")
    if files.limit != "memory.max":
        names = ("total_inactive_file", "total_active_file")
    limits = []
    for level in files.levels:
        limit = number_in(level / files.limit)
        if limit is not None and limit < UNLIMITED:
            used = number_in(level / files.usage) or 0
            kept = max(0, used - sum(_counters(level / "memory.stat", names).values()))
            limits.append((limit - kept, limit, kept))
    if not limits:
        return {}
    _, limit, kept = min(limits)
    return {"limit": limit, "kept": kept}


def read_pressure(path: Path) -> dict[str, list[float]] | None:
    """Return `some` and `full`, each as the averages of 10, 60 and 300 s in percent and the sum in microseconds."""
    found = {}
    for line in lines_of(path):
        kind, *pairs = line.split()
        values = [pair.partition("=")[2] for pair in pairs]
        if kind in ("some", "full") and len(values) == 4:  # noqa: PLR2004 - avg10 avg60 avg300 total
            found[kind] = [float(value) for value in values]
    return found or None


def _counters(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    pairs = (line.partition(" ")[::2] for line in lines_of(path))
    return {key: int(value) for key, value in pairs if key in names and value.strip().isdigit()}


def _path(root: Path, *, is_version_2: bool) -> str:
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (controllers == "") if is_version_2 else "memory" in controllers.split(","):
            return path
    return ""


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
