"""Prometheus families of host memory: a bounded number of series, whatever the files in the recorders' folder say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric

from highwater.api.families import Row, counter, gauge, known
from highwater.host.parts import Parts, parts_of
from highwater.host.past import Outlook
from highwater.host.reading import ContainerMemory, ProcessMemory, ShmMemory
from highwater.host.watch import HostNow
from highwater_worker.kernel.cgroup import EVENTS

MAX_PROCESSES: Final = 64
# Shown together, because their names, and so their series, would come and go.
_TOGETHER: Final = ("other", "resource_tracker")
_LABELS: Final = ("role", "process")
# A kind, and its field.
_KINDS: Final = (
    ("anonymous", "anonymous_bytes"),
    ("file", "file_bytes"),
    ("shared", "shmem_bytes"),
    ("swap", "swap_bytes"),
)
_CONTAINER_KINDS: Final = (
    ("anonymous", "anonymous_bytes"),
    ("shared", "shmem_bytes"),
    ("page_cache", "page_cache_bytes"),
    ("kernel", "kernel_bytes"),
)
# A family, its help, and the field of a process.
_OF_PROCESS: Final = (
    ("peak_bytes", "The most that was resident in the process since its start.", "peak_bytes"),
    ("threads", "Threads of the process.", "threads"),
    ("open_files", "Files, sockets and pipes that the process has open.", "descriptors"),
)
# A field, which names its family, and the help.
_OF_CONTAINER: Final = (
    ("used_bytes", "Memory charged to the engine's container, page cache included."),
    (
        "kept_bytes",
        "Memory of the group whose limit the engine's container meets first, without what the kernel can drop.",
    ),
    ("limit_bytes", "The memory limit that the engine's container meets first."),
)
_OF_SHM: Final = (
    ("size_bytes", "Size of the engine's /dev/shm."),
    ("free_bytes", "Free room in the engine's /dev/shm."),
    (
        "promised_bytes",
        "What files in use in /dev/shm may still allocate; a write that finds no room ends its process with SIGBUS.",
    ),
)


def host_families(now: HostNow | None) -> Iterator[Metric]:
    if now is None:
        return
    yield from _process_families(now.reading.processes)
    if now.reading.container is not None:
        yield from _container_families(now.reading.container, parts_of(now.reading), now.outlook)
    if now.reading.shm is not None:
        yield from _shm_families(now.reading.shm)


def _process_families(processes: tuple[ProcessMemory, ...]) -> Iterator[Metric]:
    alone = [one for one in processes if one.role not in _TOGETHER][:MAX_PROCESSES]
    sizes: list[Row] = [((one.role, one.name, kind), getattr(one, field)) for one in alone for kind, field in _KINDS]
    for role in _TOGETHER:
        together = [one for one in processes if one.role == role]
        for kind, field in _KINDS:
            sizes_known = [size for one in together if (size := getattr(one, field)) is not None]
            sizes.append(((role, role.replace("_", " "), kind), sum(sizes_known) if sizes_known else None))
    text = "Memory of one of the engine's processes; file and shared memory is counted in each that has it mapped."
    yield gauge("host_process_bytes", text, (*_LABELS, "kind"), sizes)
    for name, text, field in _OF_PROCESS:
        rows = (((one.role, one.name), getattr(one, field)) for one in alone)
        yield gauge(f"host_process_{name}", text, _LABELS, rows)


def _container_families(container: ContainerMemory, parts: Parts, outlook: Outlook) -> Iterator[Metric]:
    for field, text in _OF_CONTAINER:
        yield from known(f"host_container_{field}", text, getattr(container, field))
    text = "Memory of the engine's container by kind, as the kernel counts it."
    kinds = (((kind,), getattr(container, field)) for kind, field in _CONTAINER_KINDS)
    yield gauge("host_container_bytes", text, ("kind",), kinds)
    text = "Memory of the engine's container that no listed process, file or kernel figure accounts for."
    yield from known("host_container_not_attributed_bytes", text, parts.not_attributed_bytes)
    text = "Events of the engine's memory cgroup: how often a limit was met, and processes that the kernel killed."
    events = (((event,), container.events.get(event)) for event in EVENTS)
    yield counter("host_container_events", text, ("event",), events)
    if (waited := container.pressure) is not None:
        text = "Time in which some or all tasks of the engine's container waited for memory."
        rows = ((("some",), waited.some_seconds), (("full",), waited.full_seconds))
        yield counter("host_container_pressure_seconds", text, ("tasks",), rows)
    text = "When the engine's container is at its memory limit at the pace of the last minutes."
    yield from known("host_container_seconds_to_limit", text, outlook.seconds_to_limit)


def _shm_families(shm: ShmMemory) -> Iterator[Metric]:
    for field, text in _OF_SHM:
        yield from known(f"host_shm_{field}", text, getattr(shm, field))
    text = "Allocated bytes in the engine's /dev/shm by owner; left_over: what no process has open."
    sizes = Counter[str]()
    for one in shm.owners:
        sizes["left_over" if one.state == "left_over" else one.owner] += one.used_bytes
    yield gauge("host_shm_used_bytes", text, ("owner",), (((owner,), size) for owner, size in sizes.items()))
