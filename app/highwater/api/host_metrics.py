"""Prometheus families of host memory: a bounded number of series, whatever the files in the recorders' folder say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from highwater.host.cgroup import EVENTS
from highwater.host.outlook import Outlook
from highwater.host.parts import Parts, parts_of
from highwater.host.reading import ContainerMemory, ProcessMemory, ShmMemory
from highwater.host.watch import HostNow

MAX_PROCESSES: Final = 64
# Shown together, because their names, and so their series, would come and go.
_TOGETHER: Final = ("other", "resource_tracker")
# A kind, and its field.
_KINDS: Final = (
    ("anonymous", "anonymous_bytes"),
    ("file", "file_bytes"),
    ("shared", "shmem_bytes"),
    ("swap", "swap_bytes"),
)
_CONTAINER: Final = (
    ("used", "Memory charged to the engine's container, page cache included."),
    (
        "kept",
        "Memory of the group whose limit the engine's container meets first, without what the kernel can drop.",
    ),
    ("limit", "The memory limit that the engine's container meets first."),
)
_CONTAINER_KINDS: Final = (
    ("anonymous", "anonymous_bytes"),
    ("shared", "shmem_bytes"),
    ("page_cache", "page_cache_bytes"),
    ("kernel", "kernel_bytes"),
)


def host_families(now: HostNow | None) -> Iterator[Metric]:
    """Yield the families of a reading; none before the first."""
    if now is None:
        return
    yield from _process_families(now.reading.processes)
    if now.reading.container is not None:
        yield from _container_families(now.reading.container, parts_of(now.reading), now.outlook)
    if now.reading.shm is not None:
        yield from _shm_families(now.reading.shm)


def _process_families(processes: tuple[ProcessMemory, ...]) -> Iterator[Metric]:
    sizes = _gauge(
        "process_bytes",
        "Memory of one of the engine's processes; file and shared memory is counted in each that has it mapped.",
        "kind",
    )
    peaks = _gauge("process_peak_bytes", "The most that was resident in the process since its start.")
    threads = _gauge("process_threads", "Threads of the process.")
    descriptors = _gauge("process_open_files", "Files, sockets and pipes that the process has open.")
    alone = [one for one in processes if one.role not in _TOGETHER][:MAX_PROCESSES]
    for one in alone:
        labels = one.role, one.name
        for kind, field in _KINDS:
            _add(sizes, (*labels, kind), getattr(one, field))
        _add(peaks, labels, one.peak_bytes)
        _add(threads, labels, one.threads)
        _add(descriptors, labels, one.descriptors)
    for role in _TOGETHER:
        together = [one for one in processes if one.role == role]
        for kind, field in _KINDS:
            known = [size for one in together if (size := getattr(one, field)) is not None]
            _add(sizes, (role, role.replace("_", " "), kind), sum(known) if known else None)
    yield from (sizes, peaks, threads, descriptors)


def _container_families(container: ContainerMemory, parts: Parts, outlook: Outlook) -> Iterator[Metric]:
    for name, text in _CONTAINER:
        value = getattr(container, f"{name}_bytes")
        if value is not None:
            yield GaugeMetricFamily(f"highwater_host_container_{name}_bytes", text, value=value)
    text = "Memory of the engine's container by kind, as the kernel counts it."
    kinds = GaugeMetricFamily("highwater_host_container_bytes", text, labels=("kind",))
    for kind, field in _CONTAINER_KINDS:
        _add(kinds, (kind,), getattr(container, field))
    yield kinds
    if parts.not_attributed_bytes is not None:
        text = "Memory of the engine's container that no listed process, file or kernel figure accounts for."
        yield GaugeMetricFamily("highwater_host_container_not_attributed_bytes", text, value=parts.not_attributed_bytes)
    yield from _trouble_families(container)
    if outlook.seconds_to_limit is not None:
        text = "When the engine's container is at its memory limit at the pace of the last minutes."
        yield GaugeMetricFamily("highwater_host_container_seconds_to_limit", text, value=outlook.seconds_to_limit)


def _trouble_families(container: ContainerMemory) -> Iterator[Metric]:
    text = "Events of the engine's memory cgroup: how often a limit was met, and processes that the kernel killed."
    events = CounterMetricFamily("highwater_host_container_events", text, labels=("event",))
    for event in EVENTS:
        if event in container.events:
            events.add_metric((event,), container.events[event])
    yield events
    if container.pressure is not None:
        text = "Time in which some or all tasks of the engine's container waited for memory."
        waited = CounterMetricFamily("highwater_host_container_pressure_seconds", text, labels=("tasks",))
        for tasks, seconds in (("some", container.pressure.some_seconds), ("full", container.pressure.full_seconds)):
            if seconds is not None:
                waited.add_metric((tasks,), seconds)
        yield waited


def _shm_families(shm: ShmMemory) -> Iterator[Metric]:
    for name, text, value in (
        ("size", "Size of the engine's /dev/shm.", shm.size_bytes),
        ("free", "Free room in the engine's /dev/shm.", shm.free_bytes),
        (
            "promised",
            "What files in /dev/shm may still allocate; a write that finds no room ends its process with SIGBUS.",
            shm.promised_bytes,
        ),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"highwater_host_shm_{name}_bytes", text, value=value)
    text = "Allocated bytes in the engine's /dev/shm by owner, as the files' names tell it."
    used = GaugeMetricFamily("highwater_host_shm_used_bytes", text, labels=("owner",))
    for one in shm.owners:
        _add(used, (one.owner,), one.used_bytes)
    yield used


def _gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"highwater_host_{name}", text, labels=("role", "process", *more))


def _add(family: GaugeMetricFamily, labels: tuple[str, ...], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)
