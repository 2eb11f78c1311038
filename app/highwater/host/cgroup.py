"""A memory cgroup of either version: read, and made sense of, here or as the engine's own processes read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from highwater.host.process_record import RawCgroup
from highwater.host.reading import ContainerMemory, Pressure

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size, about 2^63. No machine has 2^60 bytes."""
EVENTS = ("high", "max", "oom", "oom_kill", "oom_group_kill")
_MICROSECONDS = 1e6
_STAT_WORDS = 2


def container_of(
    raw: RawCgroup,
    *,
    boot_id: str | None = None,
    host: str | None = None,
    age_seconds: float = 0.0,
    sees: Literal["engine", "sidecar"] = "engine",
) -> ContainerMemory:
    """Return what a group's counters mean.

    Args:
        raw: The counters.
        boot_id: Of the kernel.
        host: The container's name.
        age_seconds: Of the counters.
        sees: Who has read them.
    """
    parts = _parts_2(raw) if raw.version == 2 else _parts_1(raw)  # noqa: PLR2004 - the version
    kept = raw.kept
    if kept is None and raw.used is not None:
        kept = max(0, raw.used - (parts["droppable_bytes"] or 0) - (parts["reclaimable_kernel_bytes"] or 0))
    return ContainerMemory(
        key=container_key(raw, boot_id, host),
        host=host,
        version=raw.version,
        used_bytes=raw.used,
        limit_bytes=raw.limit,
        kept_bytes=kept,
        peak_bytes=raw.peak,
        swap_bytes=raw.swap,
        swap_limit_bytes=raw.swap_limit,
        events=dict(raw.events),
        pressure=pressure_of(raw.pressure),
        age_seconds=age_seconds,
        sees=sees,
        **parts,
    )


def container_key(raw: RawCgroup, boot_id: str | None, host: str | None) -> str:
    """Return what distinguishes a container from others: its group's folder, on its machine."""
    return f"{(boot_id or host or '')[:8]}-{raw.inode if raw.inode is not None else raw.path}"


def _parts_2(raw: RawCgroup) -> dict[str, int | None]:
    # Documentation/admin-guide/cgroup-v2.rst: `file` has shared memory in it, `kernel` all but socket buffers.
    stat = raw.stat
    shmem, file, sock = stat.get("shmem"), stat.get("file"), stat.get("sock")
    kernel = stat.get("kernel")
    if kernel is None:  # before Linux 5.18
        kernel = _sum(stat, "slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
    if kernel is not None and sock is not None:
        kernel += sock
    return {
        "anonymous_bytes": stat.get("anon"),
        "shmem_bytes": shmem,
        "page_cache_bytes": None if file is None else max(0, file - (shmem or 0)),
        "droppable_bytes": _sum(stat, "active_file", "inactive_file"),
        "kernel_bytes": kernel,
        "reclaimable_kernel_bytes": stat.get("slab_reclaimable"),
        "page_tables_bytes": stat.get("pagetables"),
        "sock_bytes": sock,
    }


def _parts_1(raw: RawCgroup) -> dict[str, int | None]:
    # Documentation/admin-guide/cgroup-v1/memory.rst: `cache` has shared memory in it.
    stat = raw.stat
    shmem, cache = stat.get("total_shmem"), stat.get("total_cache")
    return {
        "anonymous_bytes": stat.get("total_rss"),
        "shmem_bytes": shmem,
        "page_cache_bytes": None if cache is None else max(0, cache - (shmem or 0)),
        "droppable_bytes": _sum(stat, "total_active_file", "total_inactive_file"),
        "kernel_bytes": raw.kernel,
        "reclaimable_kernel_bytes": None,
        "page_tables_bytes": None,
        "sock_bytes": raw.sock,
    }


def _sum(stat: dict[str, int], *names: str) -> int | None:
    known = [stat[name] for name in names if name in stat]
    return sum(known) if known else None


def pressure_of(raw: dict[str, tuple[float, ...]] | None) -> Pressure | None:
    """Return the pressure of raw averages and sums."""
    if not raw:
        return None
    some, full = raw.get("some"), raw.get("full")
    return Pressure(
        some_avg10=some[0] if some else None,
        some_avg60=some[1] if some else None,
        some_avg300=some[2] if some else None,
        some_seconds=some[3] / _MICROSECONDS if some else None,
        full_avg10=full[0] if full else None,
        full_avg60=full[1] if full else None,
        full_avg300=full[2] if full else None,
        full_seconds=full[3] / _MICROSECONDS if full else None,
    )


# --- read here: of a process that this PID namespace shows, or of ourselves ---


def read_group(pid: int | str = "self", root: Path = Path("/")) -> RawCgroup | None:
    """Return the counters of a process's memory group; ``None`` where this mount of the file system does not show it.

    Args:
        pid: Of the process, in this PID namespace.
        root: The file system's root; a test brings its own.
    """
    for line in _lines(root / f"proc/{pid}/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_version_1 = "memory" in controllers.split(",")
        if not is_version_1 and controllers:
            continue
        levels = _levels(root, path, is_version_1=is_version_1)
        if levels:
            return _read_1(levels, path) if is_version_1 else _read_2(levels, path)
    return None


def _levels(root: Path, path: str, *, is_version_1: bool) -> list[Path]:
    """Return the group's folder and those above it, as far as a mount shows them."""
    usage = "memory.usage_in_bytes" if is_version_1 else "memory.current"
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, rest = before.split(), after.split()
        if len(place) < 5 or len(rest) < 3:  # noqa: PLR2004 - id parent device group point ... - kind source options
            continue
        is_it = rest[0] == "cgroup" and "memory" in rest[2].split(",") if is_version_1 else rest[0] == "cgroup2"
        if not is_it:
            continue
        top, mounted, own = root / place[4].lstrip("/"), place[3].strip("/"), path.strip("/")
        if mounted and (own + "/").startswith(mounted + "/"):
            own = own[len(mounted) :].strip("/")
        elif mounted or ".." in own.split("/"):
            own = ""
        folder = top / own
        levels = [one for one in (folder, *folder.parents) if one.is_relative_to(top) and (one / usage).is_file()]
        if levels:
            return levels
    return []


def _read_2(levels: list[Path], path: str) -> RawCgroup:
    own = levels[0]
    limit = _tightest(levels, "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
    return RawCgroup(
        version=2,
        inode=_inode(own),
        path=_short(path),
        used=_number(own / "memory.current"),
        limit=limit[0],
        kept=limit[1],
        peak=_number(own / "memory.peak"),
        swap=_number(own / "memory.swap.current"),
        swap_limit=_number(own / "memory.swap.max"),
        stat=_counters(own / "memory.stat"),
        events={key: value for key, value in _counters(own / "memory.events").items() if key in EVENTS},
        pressure=read_pressure(own / "memory.pressure"),
    )


def _read_1(levels: list[Path], path: str) -> RawCgroup:
    own = levels[0]
    names = ("total_active_file", "total_inactive_file")
    limit = _tightest(levels, "memory.limit_in_bytes", "memory.usage_in_bytes", names)
    events = {key: value for key, value in _counters(own / "memory.oom_control").items() if key == "oom_kill"}
    refused = _number(own / "memory.failcnt")
    stat = _counters(own / "memory.stat")
    return RawCgroup(
        version=1,
        inode=_inode(own),
        path=_short(path),
        used=_number(own / "memory.usage_in_bytes"),
        limit=limit[0],
        kept=limit[1],
        peak=_number(own / "memory.max_usage_in_bytes"),
        kernel=_number(own / "memory.kmem.usage_in_bytes"),
        sock=_number(own / "memory.kmem.tcp.usage_in_bytes"),
        swap=stat.get("total_swap"),
        stat=stat,
        events=events if refused is None else {**events, "max": refused},
    )


def _tightest(
    levels: list[Path], limit_file: str, usage_file: str, droppable: tuple[str, ...]
) -> tuple[int | None, int | None]:
    found: list[tuple[int, int, int]] = []
    for level in levels:
        limit = _number(level / limit_file)
        if limit is not None and limit < _UNLIMITED:
            stat = _counters(level / "memory.stat")
            kept = max(0, (_number(level / usage_file) or 0) - sum(stat.get(name, 0) for name in droppable))
            found.append((limit - kept, limit, kept))
    return min(found)[1:] if found else (None, None)


def read_pressure(path: Path) -> dict[str, tuple[float, ...]] | None:
    """Return the raw averages and sums of a pressure file (PSI); ``None`` where the kernel writes none."""
    found: dict[str, tuple[float, ...]] = {}
    for line in _lines(path):
        kind, *pairs = line.split()
        try:
            values = tuple(float(pair.partition("=")[2]) for pair in pairs)
        except ValueError:
            continue
        if kind in ("some", "full") and len(values) == 4:  # noqa: PLR2004 - avg10 avg60 avg300 total
            found[kind] = values
    return found or None


def _counters(path: Path) -> dict[str, int]:
    words = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == _STAT_WORDS and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _short(path: str) -> str:
    return path.encode("ascii", "replace").decode()[:200]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux, not mounted, not ours to read: the same as not there
        return []
