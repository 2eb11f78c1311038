"""A container's memory by owner: rows that sum to the kernel's count. Pure.

``sum(rows) + not attributed - counted twice = used``, exactly. Counted twice are pages that a forked process shares
with its parent, and shared memory that is charged to another container: each of their owners shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from highwater.host.reading import HostReading, ShmOwner, ShmState

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


_STATES: Final[dict[ShmState, str]] = {
    "in_use": "",
    "unlinked": ", unlinked and mapped",
    "left_over": ", left by an engine that is gone",
    "not_known": ", not known whether a process has them open",
}


def shm_title(one: ShmOwner) -> str:
    is_anybodys = (one.owner, one.state) == ("other", "left_over")
    state = " that no process has open" if is_anybodys else _STATES[one.state]
    return f"{SHM_TITLES.get(one.owner, one.owner)}{state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One row; the kernel drops some before it kills anything."""

    kind: PartKind
    name: str
    bytes: int
    can_be_dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All rows of one container, the largest first.

    Attributes:
        used_bytes: The kernel's count; ``None`` where it is not known, and then no sum is made.
        not_attributed_bytes: What no row accounts for.
        counted_twice_bytes: What several rows show, and the kernel counts once.
    """

    used_bytes: int | None
    rows: tuple[Part, ...]
    not_attributed_bytes: int | None
    counted_twice_bytes: int | None


def parts_of(reading: HostReading) -> Parts:
    container = reading.container
    processes = [
        Part(kind="process", name=one.name, bytes=one.anonymous_bytes)
        for one in reading.processes
        if one.anonymous_bytes is not None and (container is None or one.container in (container.key, None))
    ]
    if container is None or container.used_bytes is None:
        return Parts(used_bytes=None, rows=_sorted(processes), not_attributed_bytes=None, counted_twice_bytes=None)
    shm = _shm_rows(reading, container.shmem_bytes or 0)
    cache = _divided(
        "page_cache",
        container.page_cache_bytes,
        "page cache that is locked",
        ("page cache", container.droppable_bytes, True),
    )
    kernel = _divided(
        "kernel",
        container.kernel_bytes,
        "kernel: other",
        ("kernel: slab that can be reclaimed", container.reclaimable_kernel_bytes, True),
        ("kernel: page tables", container.page_tables_bytes, False),
        ("kernel: socket buffers", container.sock_bytes, False),
    )
    rows = [*processes, *shm, *cache, *kernel]
    # Kind by kind, so that too much of one does not hide a lack of another.
    kinds = ((processes, container.anonymous_bytes), (shm, container.shmem_bytes))
    twice = sum(max(0, sum(row.bytes for row in some) - (counted or 0)) for some, counted in kinds)
    missing = container.used_bytes - (sum(row.bytes for row in rows) - twice)
    return Parts(
        used_bytes=container.used_bytes,
        rows=_sorted(rows),
        not_attributed_bytes=max(0, missing),
        counted_twice_bytes=twice + max(0, -missing),
    )


def _shm_rows(reading: HostReading, total: int) -> list[Part]:
    owners = reading.shm.owners if reading.shm is not None else ()
    rows = [
        Part(kind="shm", name=f"{SHM}: {shm_title(one)}", bytes=one.used_bytes) for one in owners if one.used_bytes > 0
    ]
    rest = total - sum(row.bytes for row in rows)
    if rest > 0:
        # A tmpfs volume, an anonymous shared mapping, a file that was removed and is open, but not mapped.
        rows.append(Part(kind="shm", name="other shared memory", bytes=rest))
    return rows


def _divided(kind: PartKind, total: int | None, rest: str, *parts: tuple[str, int | None, bool]) -> Iterator[Part]:
    left = total or 0
    for name, size, can_be_dropped in (*parts, (rest, left, False)):
        part = min(left, size or 0)
        left -= part
        if part:
            yield Part(kind=kind, name=name, bytes=part, can_be_dropped=can_be_dropped)


def _sorted(rows: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(rows, key=lambda row: -row.bytes))
