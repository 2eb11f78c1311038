"""A memory cgroup of either version: read here, or interpreted as the engine's own processes read it. Linux alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from highwater.host.process_record import RawCgroup
from highwater.host.reading import ContainerMemory, Observer, PressureStall

EVENTS = ("high", "max", "oom", "oom_kill", "oom_group_kill")
# Version 1 writes "no limit" as the largest multiple of the page size, about 2^63. No machine has 2^60 bytes.
_UNLIMITED = 1 << 60
_MICROSECONDS = 1e6
# Of version 1 and 2: the files of what is charged, of its limit and of its peak. Files and counters that only one
# version has are read in both: they are missing in the other.
_FILES = {
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.current", "memory.max", "memory.peak"),
}


def container_of(
    raw: RawCgroup,
    *,
    boot_id: str | None = None,
    host: str | None = None,
    age_seconds: float = 0.0,
    sees: Observer = "engine",
    is_private: bool = False,
) -> ContainerMemory:
    kinds, kept = _kinds(raw), raw.kept
    if kept is None and raw.used is not None:
        kept = max(0, raw.used - (kinds["droppable_bytes"] or 0) - (kinds["reclaimable_kernel_bytes"] or 0))
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
        is_private=is_private,
        **kinds,
    )


def container_key(raw: RawCgroup, boot_id: str | None, host: str | None) -> str:
    """Return a key that distinguishes a container from others: its group's folder, on its machine."""
    return f"{(boot_id or host or '')[:8]}-{raw.inode if raw.inode is not None else raw.path}"


def _kinds(raw: RawCgroup) -> dict[str, int | None]:
    # cgroup-v2.rst: `file` includes shared memory, and `kernel` all but socket buffers. cgroup-v1/memory.rst: `cache`
    # includes shared memory; slab and page tables are not counted, and `kmem` has its own files.
    stat = raw.stat
    prefix, anonymous, cached = ("", "anon", "file") if raw.version == 2 else ("total_", "total_rss", "total_cache")  # noqa: PLR2004 - of the two
    shmem, cache, sock = stat.get(f"{prefix}shmem"), stat.get(cached), stat.get("sock", raw.sock)
    kernel = raw.kernel
    if kernel is None:
        # The sum is for kernels before Linux 5.18.
        kernel = stat.get("kernel", _sum(stat, "slab", "kernel_stack", "pagetables", "percpu", "vmalloc"))
        kernel = kernel if kernel is None or sock is None else kernel + sock
    return {
        "anonymous_bytes": stat.get(anonymous),
        "shmem_bytes": shmem,
        "page_cache_bytes": None if cache is None else max(0, cache - (shmem or 0)),
        "droppable_bytes": _sum(stat, f"{prefix}active_file", f"{prefix}inactive_file"),
        "kernel_bytes": kernel,
        "reclaimable_kernel_bytes": stat.get("slab_reclaimable"),
        "page_tables_bytes": stat.get("pagetables"),
        "sock_bytes": sock,
    }


def _sum(stat: dict[str, int], *names: str) -> int | None:
    known = [stat[name] for name in names if name in stat]
    return sum(known) if known else None


def pressure_of(raw: dict[str, tuple[float, ...]] | None) -> PressureStall | None:
    if not raw:
        return None
    figures: dict[str, float] = {}
    for kind in {"some", "full"} & raw.keys():
        *averages, total = raw[kind]
        figures |= {f"{kind}_avg{span}": value for span, value in zip((10, 60, 300), averages, strict=True)}
        figures[f"{kind}_seconds"] = total / _MICROSECONDS
    return PressureStall(**figures)


# --- reading a process's group: one that this PID namespace shows, or the sidecar's own ---


def read_group(pid: int | str = "self", root: Path = Path("/")) -> RawCgroup | None:
    """Return the counters of a process's memory group; ``None`` where no mount of the file system shows it."""
    for version, path in _memory_groups(root, pid):
        levels = _levels(root, path, version)
        if levels:
            return _read(levels, path, version)
    return None


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process's own group may use; ``None`` without a limit, or where it is not known."""
    limits = (_number(folder / _FILES[version][1]) for version, folder in _own_folders(root))
    return next((limit for limit in limits if limit is not None and 0 < limit < _UNLIMITED), None)


def _own_folders(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield each version and possible folder of this process's group, where the file systems usually are."""
    for version, path in _memory_groups(root, "self"):
        top = root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
        yield version, top / path.strip("/")
        yield version, top  # in a container the mount shows its own group, whatever path the kernel gives


def _memory_groups(root: Path, pid: int | str) -> Iterator[tuple[int, str]]:
    """Yield the version and the path of each hierarchy that may count a process's memory."""
    for line in _lines(root / f"proc/{pid}/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            yield 1, path
        elif not controllers:
            yield 2, path


def _levels(root: Path, path: str, version: int) -> list[Path]:
    """Return the group's folder and those above it, as far as a mount shows them."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, rest = before.split(), after.split()
        if len(place) < 5 or len(rest) < 3:  # noqa: PLR2004 - id parent device group point ... - kind source options
            continue
        if version == 1 and (rest[0] != "cgroup" or "memory" not in rest[2].split(",")):
            continue
        if version != 1 and rest[0] != "cgroup2":
            continue
        top, mounted, own = root / place[4].lstrip("/"), place[3].strip("/"), path.strip("/")
        if mounted and (own + "/").startswith(mounted + "/"):
            own = own[len(mounted) :].strip("/")
        elif mounted or ".." in own.split("/"):
            own = ""
        folders = (top / own, *(top / own).parents)
        levels = [one for one in folders if one.is_relative_to(top) and (one / _FILES[version][0]).is_file()]
        if levels:
            return levels
    return []


def _read(levels: list[Path], path: str, version: int) -> RawCgroup:
    own = levels[0]
    stat, refused = _counters(own / "memory.stat"), _number(own / "memory.failcnt")
    used_file, limit_file, peak_file = _FILES[version]
    counted = _counters(own / "memory.events") | _counters(own / "memory.oom_control")
    events = {key: value for key, value in counted.items() if key in EVENTS}
    prefix = "total_" if version == 1 else ""
    droppable = (f"{prefix}active_file", f"{prefix}inactive_file", "slab_reclaimable")
    limits: list[tuple[int, int, int]] = []
    for level in levels:
        limit = _number(level / limit_file)
        if limit is not None and limit < _UNLIMITED:
            counters = _counters(level / "memory.stat")
            kept = max(0, (_number(level / used_file) or 0) - sum(counters.get(name, 0) for name in droppable))
            limits.append((limit - kept, limit, kept))
    _, tightest, kept_there = min(limits) if limits else (None, None, None)
    return RawCgroup(
        version=version,
        inode=_inode(own),
        path=path.encode("ascii", "replace").decode()[:200],
        used=_number(own / used_file),
        limit=tightest,
        kept=kept_there,
        peak=_number(own / peak_file),
        kernel=_number(own / "memory.kmem.usage_in_bytes"),
        sock=_number(own / "memory.kmem.tcp.usage_in_bytes"),
        swap=stat.get("total_swap", _number(own / "memory.swap.current")),
        swap_limit=_number(own / "memory.swap.max"),
        stat=stat,
        events=events if refused is None else {**events, "max": refused},
        pressure=read_pressure(own / "memory.pressure"),
    )


def read_pressure(path: Path) -> dict[str, tuple[float, ...]] | None:
    """Return the raw averages and sums of a pressure file (PSI); ``None`` where the kernel writes none."""
    averages: dict[str, tuple[float, ...]] = {}
    for line in _lines(path):
        kind, *pairs = line.split()
        try:
            values = tuple(float(pair.partition("=")[2]) for pair in pairs)
        except ValueError:
            continue
        if kind in ("some", "full") and len(values) == 4:  # noqa: PLR2004 - avg10 avg60 avg300 total
            averages[kind] = values
    return averages or None


def _counters(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}  # noqa: PLR2004 - name and value


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux, not mounted, not readable: the same as missing
        return []
