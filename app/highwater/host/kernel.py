"""What the kernel says of host memory: read here, or by the engine's processes and in their files. Linux alone.

``/proc`` is used for processes that write no file, where the PID namespace is shared: those of an engine without the
worker package, and others that it has started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from highwater.host.reading import (
    SHM,
    ContainerMemory,
    Observer,
    PressureStall,
    ProcessMemory,
    Role,
    ShmMemory,
    ShmOwner,
    ShmState,
)
from highwater.model.units import sum_known
from highwater.process.untrusted import plain
from highwater_worker.kernel.cgroup import EVENTS, read_cgroup, read_pressure
from highwater_worker.kernel.proc import (
    ROOT,
    SHOWN,
    count_descriptors,
    lines_of,
    mount_of,
    read_figures,
    read_stat,
    title_of,
)
from highwater_worker.kernel.shm import read_shm

MAX_PROCESSES = 8192
"""Processes of the machine that a search goes through."""
MAX_FOUND = 128
_MICROSECONDS = 1e6
_MAX_NUMBER = 1 << 60
"""No machine has so many bytes."""
_MAX_INODE = 1 << 64
_MAX_PATH = 160
_OWNER = re.compile(r"[a-z0-9_]{1,48}", re.ASCII)

# --- memory cgroups ---


def container_of(
    raw: Mapping[str, Any],
    *,
    boot_id: str | None = None,
    host: str | None = None,
    age_seconds: float = 0.0,
    sees: Observer = "engine",
    is_private: bool = False,
) -> ContainerMemory:
    """Interpret the counters that the worker package reads, here or in a foreign file, of which nothing is sure."""
    numbers, stat, events = _numbers(raw), _numbers(raw.get("stat")), _numbers(raw.get("events"))
    # cgroup-v2.rst: `file` includes shared memory, and `kernel` all but socket buffers. cgroup-v1/memory.rst: `cache`
    # includes shared memory; slab and page tables are not counted, and `kmem` has its own files.
    is_version_2 = numbers.get("version") == 2  # noqa: PLR2004 - of the two
    prefix, anonymous, cached = ("", "anon", "file") if is_version_2 else ("total_", "total_rss", "total_cache")
    shmem, cache, sock = stat.get(f"{prefix}shmem"), stat.get(cached), stat.get("sock", numbers.get("sock"))
    kernel = numbers.get("kernel")
    if kernel is None:
        parts = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")  # for kernels before Linux 5.18
        kernel = stat.get("kernel", sum_known(map(stat.get, parts)))
        kernel = kernel if kernel is None or sock is None else kernel + sock
    droppable = sum_known(stat.get(f"{prefix}{name}") for name in ("active_file", "inactive_file"))
    reclaimable = stat.get("slab_reclaimable")
    used, kept = numbers.get("used"), numbers.get("kept")
    if kept is None and used is not None:
        kept = max(0, used - (droppable or 0) - (reclaimable or 0))
    return ContainerMemory(
        key=container_key(raw, boot_id, host),
        host=host,
        version=numbers.get("version"),
        used_bytes=used,
        limit_bytes=numbers.get("limit"),
        kept_bytes=kept,
        peak_bytes=numbers.get("peak"),
        anonymous_bytes=stat.get(anonymous),
        shmem_bytes=shmem,
        page_cache_bytes=None if cache is None else max(0, cache - (shmem or 0)),
        droppable_bytes=droppable,
        kernel_bytes=kernel,
        reclaimable_kernel_bytes=reclaimable,
        page_tables_bytes=stat.get("pagetables"),
        sock_bytes=sock,
        swap_bytes=numbers.get("swap"),
        swap_limit_bytes=numbers.get("swap_limit"),
        events={name: events[name] for name in EVENTS if name in events},
        pressure=pressure_of(raw.get("pressure")),
        age_seconds=age_seconds,
        sees=sees,
        is_private=is_private,
    )


def container_key(raw: Mapping[str, Any], boot_id: str | None, host: str | None) -> str:
    """Return what distinguishes a container of its machine: the inode of its group's folder, or its path."""
    inode = raw.get("inode")
    is_known = type(inode) is int and 0 <= inode < _MAX_INODE
    return f"{(boot_id or host or '')[:8]}-{inode if is_known else plain(str(raw.get('path', '')), _MAX_PATH)}"


def _numbers(source: object) -> dict[str, int]:
    """Return what are whole numbers and could be true: sums of several are numbers that every reader takes."""
    pairs = source.items() if isinstance(source, Mapping) else ()
    return {key: value for key, value in pairs if type(value) is int and 0 <= value < _MAX_NUMBER}


def pressure_of(raw: object) -> PressureStall | None:
    figures: dict[str, float] = {}
    for kind in ("some", "full"):
        row = raw.get(kind) if isinstance(raw, Mapping) else None
        values = [float(one) for one in row if type(one) in {int, float}] if isinstance(row, list) else []
        if len(values) == 4 and all(0 <= one < _MAX_NUMBER for one in values):  # noqa: PLR2004 - avg10 avg60 avg300 total
            figures |= {f"{kind}_avg{span}": value for span, value in zip((10, 60, 300), values[:3], strict=True)}
            figures[f"{kind}_seconds"] = values[3] / _MICROSECONDS
    return PressureStall(**figures) if figures else None


def memory_limit(root: Path = ROOT) -> int | None:
    """Return how many bytes this process's own group may use; ``None`` without a limit, or where it is not known."""
    return read_cgroup(root).limit_bytes


# --- /dev/shm ---


def shm_of(
    raw: Mapping[str, Any], *, age_seconds: float = 0.0, sees: Observer = "engine", sees_all: bool = True
) -> ShmMemory:
    """Interpret what ``read_shm`` returned, here or in a foreign file.

    Unless who looked ``sees_all`` that may have files open, what none of those has open may be another's.
    """
    numbers = _numbers(raw)
    rows: dict[tuple[ShmState, str], list[int]] = {}
    for state in get_args(ShmState):
        known: ShmState = "not_known" if state == "left_over" and not sees_all else state
        told = raw.get("owners" if state == "in_use" else state)
        for owner, row in told.items() if isinstance(told, Mapping) else ():
            figures = list(_numbers(dict(enumerate(row))).values()) if isinstance(row, list) else []
            if _OWNER.fullmatch(owner) and len(figures) == 3:  # noqa: PLR2004 - files, used, promised
                rows[known, owner] = figures
    owners = [
        ShmOwner(owner=owner, state=state, files=files, used_bytes=used, promised_bytes=promised)
        for (state, owner), (files, used, promised) in rows.items()
    ]
    return ShmMemory(
        size_bytes=numbers.get("size"),
        used_bytes=numbers.get("used"),
        free_bytes=numbers.get("free"),
        owners=tuple(sorted(owners, key=lambda one: (-one.used_bytes, one.owner))),
        promised_bytes=sum(one.promised_bytes for one in owners if one.is_in_use),
        age_seconds=age_seconds,
        sees=sees,
    )


def own_shm(folder: str, root: Path) -> ShmMemory | None:
    try:
        return shm_of(read_shm(folder, f"{root}/proc"), sees="sidecar")
    except OSError:
        return None


def shares_shm(pid: int, root: Path) -> bool:
    """Return whether a process has the sidecar's own file system at ``/dev/shm``: each container may have its own."""
    theirs, own = mount_of(SHM, root, pid), mount_of(SHM, root)
    return (theirs and theirs.device) == (own and own.device)


# --- processes ---

# Titles that vLLM gives its processes, beginning with VLLM_PROCESS_NAME_PREFIX; `::` may be cut off with the prefix.
_TITLES: tuple[tuple[str, Role], ...] = (
    ("::APIServer", "api_server"),
    ("::EngineCore", "engine_core"),
    ("::Worker", "worker"),
    ("::DPCoordinator", "coordinator"),
    ("::DPSupervisor", "launcher"),
    ("multiprocessing.resource_tracker", "resource_tracker"),
)
# `/usr/bin/vllm serve`, `python -m vllm.entrypoints.openai.api_server`; not a program that has such words further on.
_SERVES = re.compile(r"^(?:\S+ )?(?:-\S+ ){0,2}(?:\S*/)?vllm(?: serve\b|[./]entrypoints)")


def role_of(title: str) -> Role:
    for mark, role in _TITLES:
        if mark in title:
            return role
    return "api_server" if _SERVES.search(title) else "other"


def find_engine(root: Path, known: Iterable[int]) -> tuple[ProcessMemory, ...]:
    """Return the processes of an engine: those known, their ancestors as far as these are vLLM's, and all below.

    What starts an API server, and is none of vLLM's processes itself, may have started another engine's too.
    """
    parents: dict[int, int] = {}
    with suppress(OSError):
        for pid in [int(name) for name in os.listdir(root / "proc") if name.isdigit()][:MAX_PROCESSES]:
            with suppress(OSError, ValueError, IndexError):
                parents[pid] = read_stat(pid, root).parent
    roots: set[int] = set()
    for pid in known:
        top = pid
        while (above := parents.get(top, 0)) > 1 and "vllm" in _title(above, root).lower():
            if (role_of(_title(top, root)), role_of(_title(above, root))) == ("api_server", "other"):
                break
            top = above
        if top in parents:
            roots.add(top)
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    pids: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in pids:
            pids.add(pid)
            waiting += children.get(pid, [])
    rows = (read_process(root, pid) for pid in islice(sorted(pids), MAX_FOUND))
    return tuple(one for one in rows if one is not None)


def read_process(root: Path, pid: int) -> ProcessMemory | None:
    """Return a process under its program's name; ``None`` if it has ended, or is one of the kernel's own threads."""
    try:
        figures, stat = read_figures(pid, root), read_stat(pid, root)
    except (OSError, ValueError, IndexError):
        return None
    if "anonymous_bytes" not in figures:
        return None
    more: dict[str, Any] = {name: figures[name] for name in SHOWN if name in figures}
    with suppress(OSError):  # before Linux 6.2 only its owner may see them
        more["descriptors"] = count_descriptors(root, pid)
    limits = "\n".join(lines_of(root / f"proc/{pid}/limits"))
    if most := re.search(r"^Max open files +([0-9]{1,15}) ", limits, re.MULTILINE):
        more["descriptors_limit"] = int(most[1])
    title = _title(pid, root)
    return ProcessMemory(
        role=role_of(title),
        name=plain(title, 120).split(" ")[0].rpartition("/")[2][:40],
        pid=pid,
        started=stat.started,
        parent_pid=stat.parent,
        source="proc",
        **more,
    )


def _title(pid: int, root: Path) -> str:
    try:
        return title_of(pid, root)
    except OSError:
        return ""


def own_pressure(root: Path) -> PressureStall | None:
    return pressure_of(read_pressure(root / "proc/pressure/memory"))
