"""Memory cgroups of either version: the tightest limit, a group's own counters, and the processes in it."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from highwater_worker.kernel.proc import ROOT, SHOWN, lines_of, read_figures, read_mounts, read_stat, title_of

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size: about 2^63. No machine has 2^60 bytes."""
_MAX_PATH = 160
_MAX_READ, _MAX_LISTED, _MAX_NAME = 128, 8, 48
# Of `memory.stat`. Version 1 counts a group's children only in those that begin with `total_`.
_STAT_2 = (
    *("anon", "file", "shmem", "kernel", "kernel_stack", "pagetables", "percpu", "sock", "vmalloc", "slab"),
    *("slab_reclaimable", "active_file", "inactive_file"),
)
_STAT_1 = ("total_rss", "total_cache", "total_shmem", "total_active_file", "total_inactive_file")
EVENTS = ("high", "max", "oom", "oom_kill", "oom_group_kill")


class CgroupMemory(NamedTuple):
    """Memory of the group with the limit that this process will meet first."""

    used_bytes: int | None
    """Charged to the group, without what the kernel drops before it kills anything."""
    limit_bytes: int | None


class GroupFiles(NamedTuple):
    """The memory groups of this process, its own first, and the names of their files."""

    levels: tuple[Path, ...]
    path: str  # of the own group, as the kernel names it
    version: int
    limit: str
    usage: str
    events: str
    dropped: tuple[str, ...]
    """Of `memory.stat`: what the kernel drops before it kills anything: pages that are in files too, and slab. Pages
    read often, such as weights that two ranks read, are active, and dropped all the same. Shared memory is in none."""

    def used(self, level: Path) -> int | None:
        usage = _number_in(level / self.usage)
        return None if usage is None else max(0, usage - sum(_counters(level / "memory.stat", self.dropped).values()))

    def tightest(self) -> CgroupMemory | None:
        limited = []
        for level in self.levels:
            # The limit first: to write memory.stat the kernel adds up the counters of all processors and groups below.
            limit = _number_in(level / self.limit)
            if limit is not None and limit < _UNLIMITED:
                used = self.used(level)
                limited.append((limit - (used or 0), limit, used))
        if not limited:
            return None
        _, limit, used = min(limited, key=lambda group: group[:2])
        return CgroupMemory(used, limit)


_VERSION_1 = GroupFiles(
    *((), "", 1, "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = GroupFiles(
    *((), "", 2, "memory.max", "memory.current", "memory.events"), ("inactive_file", "active_file", "slab_reclaimable")
)


def read_cgroup(root: Path) -> CgroupMemory:
    files = group_files(root)
    if files is None:
        return CgroupMemory(None, None)
    return files.tightest() or CgroupMemory(files.used(files.levels[0]), None)


def read_oom_kills(root: Path) -> int | None:
    """Return how many processes of this process's own group the kernel has killed for memory; None where unknown.

    The kernel counts every process, also of a group that it killed as a whole (`oom_group_kill` counts the groups), and
    those of groups below. Both versions write `oom_kill N`.
    """
    files = group_files(root)
    return None if files is None else _counters(files.levels[0] / files.events, EVENTS).get("oom_kill")


def read_container(root: Path = ROOT, pid: int | str = "self", *, path: str | None = None) -> dict[str, Any] | None:
    """Return raw counters of a process's own group, and its tightest limit; None without groups.

    The sidecar interprets them, which may be in another container. A `path` is a group's whose processes have ended,
    as its kernel names it; in another namespace it names another group, which the inode shows.
    """
    if path is not None:
        files = _find_groups(root, [f"0:memory:{path}", f"0::{path}"])
    else:
        files = group_files(root) if pid == "self" else _find_groups(root, lines_of(root / f"proc/{pid}/cgroup"))
    if files is None:
        return None
    own, is_version_2 = files.levels[0], files.version == 2  # noqa: PLR2004 - of the two
    inode = None
    with suppress(OSError):  # it ends
        inode = os.stat(own).st_ino
    refused = _number_in(own / "memory.failcnt")
    # Once: to write it the kernel adds up the counters of all processors.
    stat = _counters(own / "memory.stat", _STAT_2 if is_version_2 else (*_STAT_1, "total_swap"))
    swap = _number_in(own / "memory.swap.current") if is_version_2 else stat.pop("total_swap", None)
    # What only one version has is missing in the other.
    counters: dict[str, Any] = {
        "version": files.version,
        "inode": inode,
        "path": files.path[:_MAX_PATH],
        "used": _number_in(own / files.usage),
        "stat": stat,
        "peak": _number_in(own / ("memory.peak" if is_version_2 else "memory.max_usage_in_bytes")),
        "kernel": _number_in(own / "memory.kmem.usage_in_bytes"),
        "sock": _number_in(own / "memory.kmem.tcp.usage_in_bytes"),
        "swap": swap,
        "swap_limit": _number_in(own / "memory.swap.max"),
        "events": _counters(own / files.events, EVENTS) | ({} if refused is None else {"max": refused}),
        "pressure": read_pressure(own / "memory.pressure"),
    }
    tightest = files.tightest()
    if tightest is not None:
        counters.update(limit=tightest.limit_bytes, kept=tightest.used_bytes or 0)
    return {name: value for name, value in counters.items() if value is not None}


def read_pressure(path: Path) -> dict[str, list[float]] | None:
    """Return `some` and `full`, each as the averages of 10, 60 and 300 s in percent and the sum in microseconds."""
    pressure = {}
    for line in lines_of(path):
        with suppress(ValueError):  # of a kernel that writes it otherwise
            kind, *pairs = line.split()
            values = [float(pair.partition("=")[2]) for pair in pairs]
            if kind in ("some", "full") and len(values) == 4:  # noqa: PLR2004 - avg10 avg60 avg300 total
                pressure[kind] = values
    return pressure or None


def list_processes(written: set[int], root: Path = ROOT) -> dict[str, Any]:
    """Return the largest processes of this process's group as `largest`, and their number as `total`.

    They are found in the container's own group, so that a machine's other processes cost nothing. `written` are the
    processes that have files of their own.
    """
    files = group_files(root)
    pids: list[int] = []
    if files is not None:
        with suppress(OSError, ValueError):
            pids = [int(line) for line in (files.levels[0] / "cgroup.procs").read_text("ascii").split()]
    others = [pid for pid in pids if pid > 0 and pid not in written]
    rows = [row for pid in others[:_MAX_READ] if (row := _row(pid, root)) is not None]
    rows.sort(key=lambda row: row.get("anonymous_bytes", 0), reverse=True)
    return {"total": len(others), "largest": rows[:_MAX_LISTED]}


def _row(pid: int, root: Path) -> dict[str, Any] | None:
    try:
        figures, title, started = read_figures(pid, root), title_of(pid, root), read_stat(pid, root).started
    except (OSError, ValueError, IndexError):  # it has ended meanwhile
        return None
    if not any(name in figures for name in SHOWN[:3]):  # the kernel's own thread, or a process that has ended
        return None
    is_tracker = "multiprocessing.resource_tracker" in title
    name = "resource tracker" if is_tracker else figures.get("command", "")[:_MAX_NAME]
    known = {key: figures[key] for key in SHOWN if key in figures}
    return {"pid": pid, "started": started, "name": name, "tracker": is_tracker, **known}


# The files' places are constant while a process runs, and finding them costs more than reading them.
@functools.lru_cache(maxsize=8)
def group_files(root: Path) -> GroupFiles | None:
    return _find_groups(root, lines_of(root / "proc/self/cgroup"))


def _find_groups(root: Path, lines: Sequence[str]) -> GroupFiles | None:
    mounts = list(read_mounts(root))
    tops = {
        1: [mount for mount in mounts if mount.kind == "cgroup" and "memory" in mount.options.split(",")],
        2: [mount for mount in mounts if mount.kind == "cgroup2"],
    }
    # A hybrid machine mounts both versions; memory is then with version 1, which has the controller's name.
    for files in (_VERSION_1, _VERSION_2):
        for line in lines:
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if "memory" in controllers.split(",") if files.version == 1 else controllers == "":
                for mount in tops[files.version]:
                    top = root / mount.point.lstrip("/")
                    own = top / _relative(path, mount.group)
                    levels = [level for level in (own, *own.parents) if level.is_relative_to(top)]
                    levels = [level for level in levels if (level / files.usage).is_file()]
                    if levels:
                        return files._replace(levels=tuple(levels), path=path)
    return None


def _relative(path: str, mounted: str) -> str:
    """Return the group's path below what is mounted; empty where the container sees only its own group."""
    path, mounted = path.strip("/"), mounted.strip("/")
    if mounted and (path + "/").startswith(mounted + "/"):
        path = path[len(mounted) :].strip("/")
    elif mounted:
        path = ""
    return "" if ".." in path.split("/") else path


def _number_in(path: Path) -> int | None:
    lines = lines_of(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _counters(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    pairs = (line.partition(" ")[::2] for line in lines_of(path))
    return {key: int(value) for key, value in pairs if key in names and value.strip().isdigit()}
