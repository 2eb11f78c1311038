"""A memory cgroup of either version: read here, or interpreted as the engine's own processes read it. Linux alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from highwater.host.process_record import RawCgroup
from highwater.host.reading import ContainerMemory, Observer, PressureStall
from highwater_worker.kernel.cgroup import read_container
from highwater_worker.kernel.proc import lines_of

EVENTS = ("high", "max", "oom", "oom_kill", "oom_group_kill")
# Version 1 writes "no limit" as the largest multiple of the page size, about 2^63. No machine has 2^60 bytes.
_UNLIMITED = 1 << 60
_MICROSECONDS = 1e6


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


def pressure_of(raw: Mapping[str, Sequence[float]] | None) -> PressureStall | None:
    if not raw:
        return None
    figures: dict[str, float] = {}
    for kind in {"some", "full"} & raw.keys():
        *averages, total = raw[kind]
        figures |= {f"{kind}_avg{span}": value for span, value in zip((10, 60, 300), averages, strict=True)}
        figures[f"{kind}_seconds"] = total / _MICROSECONDS
    return PressureStall(**figures)


def read_group(pid: int | str = "self", root: Path = Path("/")) -> RawCgroup | None:
    read = read_container(root, pid)
    return None if read is None else RawCgroup(**read)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process's own group may use; ``None`` without a limit, or where it is not known."""
    texts = (line.strip() for path in _limit_files(root) for line in lines_of(path)[:1])
    limits = (int(text) for text in texts if text.isdigit())
    return next((limit for limit in limits if 0 < limit < _UNLIMITED), None)


def _limit_files(root: Path) -> Iterator[Path]:
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or "memory" in controllers.split(","):
            top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
            # In a container the mount shows its own group, whatever path the kernel gives.
            for folder in (top / path.strip("/"), top):
                yield folder / ("memory.limit_in_bytes" if controllers else "memory.max")
