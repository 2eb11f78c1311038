"""The memory limit that a container puts on this process, from the cgroup file systems of either version."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size: about 2^63. No machine has 2^60 bytes."""


class CgroupMemory(NamedTuple):
    """Memory of the group whose limit this process will meet first."""

    used_bytes: int | None
    """Charged to the group, without file pages that the kernel drops before it kills anything."""
    limit_bytes: int | None


# Of `memory.stat`: pages that are in files too, which the kernel drops before it kills anything. Pages read often, such
# as weights that two ranks read, are active, and dropped all the same. Shared memory is in neither.
_PAGE_CACHE_1 = ("total_inactive_file", "total_active_file")
_PAGE_CACHE_2 = ("inactive_file", "active_file")


class GroupFiles(NamedTuple):
    """The memory groups of this process, its own first, and the names of their files."""

    levels: tuple[Path, ...]
    limit: str
    usage: str
    page_cache: tuple[str, ...]


def read_cgroup(root: Path) -> CgroupMemory:
    """Return use and limit of the tightest group from the process's own upwards; nulls without one.

    Args:
        root: The file system's root; a test brings its own.
    """
    files = group_files(root)
    if files is None:
        return CgroupMemory(None, None)
    limited: list[tuple[int, CgroupMemory]] = []
    for level in files.levels:
        limit = number_in(level / files.limit)
        # The limit first: to write memory.stat the kernel adds up the counters of all processors and all groups below.
        if limit is not None and limit < UNLIMITED:
            used = _used(level, files)
            limited.append((limit - (used or 0), CgroupMemory(used, limit)))
    if limited:
        return min(limited)[1]
    return CgroupMemory(_used(files.levels[0], files), None)


def read_oom_kills(root: Path) -> int | None:
    """Return how many processes of this process's own group the kernel has killed for memory; None where unknown.

    The kernel counts every process, also of a group that it killed as a whole (`oom_group_kill` counts the groups), and
    those of groups below. Both versions write `oom_kill N`.

    Args:
        root: The file system's root; a test brings its own.
    """
    files = group_files(root)
    if files is None:
        return None
    name = "memory.events" if files.limit == "memory.max" else "memory.oom_control"
    counts = dict(line.partition(" ")[::2] for line in lines_of(files.levels[0] / name))
    count = counts.get("oom_kill", "").strip()
    return int(count) if count.isdigit() else None


def _used(level: Path, files: GroupFiles) -> int | None:
    usage = number_in(level / files.usage)
    if usage is None:
        return None
    return max(0, usage - _sum_of(level / "memory.stat", files.page_cache))


class _Mount(NamedTuple):
    group: str
    point: str
    kind: str
    options: str

    @property
    def is_version_1(self) -> bool:
        return self.kind == "cgroup" and "memory" in self.options.split(",")


# The files' places are constant while a worker runs, and finding them costs more than reading them.
@functools.lru_cache(maxsize=8)
def group_files(root: Path) -> GroupFiles | None:
    """Return where the files of this process's memory groups are; None where there are none.

    Args:
        root: The file system's root; a test brings its own.
    """
    groups = lines_of(root / "proc/self/cgroup")
    mounts = list(_mounts(lines_of(root / "proc/self/mountinfo")))
    # A hybrid machine mounts both versions; memory is then with version 1, which has the controller's name.
    for line in groups:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            tops = [(root / mount.point, mount.group) for mount in mounts if mount.is_version_1]
            levels = _levels(tops, path, "memory.usage_in_bytes")
            if levels:
                return GroupFiles(levels, "memory.limit_in_bytes", "memory.usage_in_bytes", _PAGE_CACHE_1)
    for line in groups:
        if line.startswith("0::"):
            tops = [(root / mount.point, mount.group) for mount in mounts if mount.kind == "cgroup2"]
            levels = _levels(tops, line[3:], "memory.current")
            if levels:
                return GroupFiles(levels, "memory.max", "memory.current", _PAGE_CACHE_2)
    return None


def _mounts(lines: list[str]) -> Iterator[_Mount]:
    for line in lines:
        # id parent major:minor group mount-point options [tags] - kind source options (proc_pid_mountinfo(5))
        before, _, after = line.partition(" - ")
        place, rest = before.split(), after.split()
        if len(place) > 4 and len(rest) > 2:  # noqa: PLR2004 - the fields read below
            yield _Mount(place[3], place[4].lstrip("/"), rest[0], rest[2])


def _levels(tops: list[tuple[Path, str]], path: str, needed: str) -> tuple[Path, ...]:
    """Return the groups from the process's own up to the top of the first mount that shows any."""
    for top, mounted in tops:
        own = top / _relative(path, mounted)
        levels = [level for level in (own, *own.parents) if level.is_relative_to(top) and (level / needed).is_file()]
        if levels:
            return tuple(levels)
    return ()


def _relative(path: str, mounted: str) -> str:
    """Return the group's path below what is mounted; empty where the container sees only its own group."""
    path, mounted = path.strip("/"), mounted.strip("/")
    if mounted and (path + "/").startswith(mounted + "/"):
        path = path[len(mounted) :].strip("/")
    elif mounted:
        path = ""
    return "" if ".." in path.split("/") else path


def number_in(path: Path) -> int | None:
    """Return the number that a file holds, None where it holds another word or cannot be read."""
    lines = lines_of(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _sum_of(path: Path, names: tuple[str, ...]) -> int:
    pairs = (line.partition(" ")[::2] for line in lines_of(path))
    return sum(int(value) for key, value in pairs if key in names and value.strip().isdigit())


def lines_of(path: Path) -> list[str]:
    """Return a file's lines, none where it cannot be read."""
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:  # not Linux, not mounted, not ours to read: the same as not there
        return []
