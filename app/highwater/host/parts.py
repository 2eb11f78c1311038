"""A container's memory by owner: rows that sum to the kernel's count. Pure.

``sum(rows) + not attributed - counted twice = used``, exactly. Counted twice are pages that a forked process shares
with its parent, and shared memory that is charged to another container: each of their owners shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from highwater.host.reading import ContainerMemory, HostReading, ProcessMemory

PartKind: TypeAlias = Literal["process", "shm", "page_cache", "kernel"]

SHM = "/dev/shm"  # noqa: S108 - a name to show
SHM_TITLES = {
    "rpc_rings": "RPC rings of vLLM",
    "processor_cache": "processor cache (shm)",
    "cpu_collectives": "collectives of the CPU backend",
    "kv_offload": "offloaded KV cache",
    "encoder_offload": "offloaded encoder outputs",
    "nccl": "NCCL",
    "hccl": "HCCL",
    "torch": "PyTorch tensors",
    "ray": "Ray",
    "recorder": "recorders of Highwater",
    "semaphores": "semaphores",
    "openmp": "OpenMP",
    "other": "other files",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One row.

    Attributes:
        kind: A process's anonymous memory, files in ``/dev/shm``, cached files, or the kernel's own.
        name: What an operator calls it.
        bytes: Its size.
        can_be_dropped: Whether the kernel drops it before it kills anything.
    """

    kind: PartKind
    name: str
    bytes: int
    can_be_dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All rows of one container, the largest first.

    Attributes:
        used_bytes: What the kernel counts; ``None`` where it is not known, and nothing sums to anything.
        rows: The rows.
        not_attributed_bytes: What nobody listed has.
        counted_twice_bytes: What several rows show, and the kernel counts once.
    """

    used_bytes: int | None
    rows: tuple[Part, ...]
    not_attributed_bytes: int | None
    counted_twice_bytes: int | None


def parts_of(reading: HostReading, container: ContainerMemory | None = None) -> Parts:
    """Return the rows of a container; by default of the engine's.

    Args:
        reading: Everything that was read.
        container: The container; without any, processes are listed and sum to nothing.
    """
    which = container or reading.container
    inside = [one for one in reading.processes if which is None or one.container in (which.key, None)]
    rows = [_process(one) for one in inside if one.anonymous_bytes is not None]
    # Without a figure of the kernel's there is nothing that they could be compared with.
    if which is None or which.used_bytes is None:
        return Parts(used_bytes=None, rows=_sorted(rows), not_attributed_bytes=None, counted_twice_bytes=None)
    shm = _shm_rows(reading, which) if which == reading.container else _plain_shm(which)
    rows += shm
    rows += _cache_rows(which)
    rows += _kernel_rows(which)
    # Kind by kind, so that too much of one does not hide a lack of another.
    surpluses = [
        sum(row.bytes for row in rows if row.kind == "process") - (which.anonymous_bytes or 0),
        sum(row.bytes for row in shm) - (which.shmem_bytes or 0),
    ]
    twice = sum(max(0, surplus) for surplus in surpluses)
    missing = which.used_bytes - (sum(row.bytes for row in rows) - twice)
    return Parts(
        used_bytes=which.used_bytes,
        rows=_sorted(rows),
        not_attributed_bytes=max(0, missing),
        counted_twice_bytes=twice + max(0, -missing),
    )


def _process(one: ProcessMemory) -> Part:
    return Part(kind="process", name=one.name, bytes=one.anonymous_bytes or 0)


def _shm_rows(reading: HostReading, container: ContainerMemory) -> list[Part]:
    owners = reading.shm.owners if reading.shm is not None else ()
    rows = [
        Part(kind="shm", name=f"{SHM}: {SHM_TITLES.get(one.owner, one.owner)}", bytes=one.used_bytes)
        for one in owners
        if one.used_bytes > 0
    ]
    rest = (container.shmem_bytes or 0) - sum(row.bytes for row in rows)
    if rest > 0:
        # A tmpfs volume, an anonymous shared mapping, a file that was removed and is still open.
        rows.append(Part(kind="shm", name="other shared memory", bytes=rest))
    return rows


def _plain_shm(container: ContainerMemory) -> list[Part]:
    return [Part(kind="shm", name="shared memory", bytes=container.shmem_bytes)] if container.shmem_bytes else []


def _cache_rows(container: ContainerMemory) -> list[Part]:
    cache = container.page_cache_bytes or 0
    droppable = min(cache, container.droppable_bytes or 0)
    rows = [Part(kind="page_cache", name="page cache", bytes=droppable, can_be_dropped=True)] if droppable else []
    if cache > droppable:
        rows.append(Part(kind="page_cache", name="page cache that is locked", bytes=cache - droppable))
    return rows


def _kernel_rows(container: ContainerMemory) -> list[Part]:
    left, rows = container.kernel_bytes or 0, []
    for name, size, can_be_dropped in (
        ("kernel: slab that can be reclaimed", container.reclaimable_kernel_bytes, True),
        ("kernel: page tables", container.page_tables_bytes, False),
        ("kernel: socket buffers", container.sock_bytes, False),
    ):
        part = min(left, size or 0)
        left -= part
        if part:
            rows.append(Part(kind="kernel", name=name, bytes=part, can_be_dropped=can_be_dropped))
    if left:
        rows.append(Part(kind="kernel", name="kernel: other", bytes=left))
    return rows


def _sorted(rows: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(rows, key=lambda row: -row.bytes))
