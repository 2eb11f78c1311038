"""Series of host memory: each process of the engine, and ``/dev/shm``. Pure; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from highwater.growth.floors import Bound
from highwater.growth.series import Measured, SeriesKey, encoder_cache_bound, life_of
from highwater.host.reading import HostReading, ProcessMemory, Role
from highwater.readings.growth import GrowthDriver, GrowthUnit
from highwater.readings.rank import RankReading
from highwater.units import GIB

# Other processes of the container come and go; /memory/host shows them.
_ROLES: Final[frozenset[Role]] = frozenset(
    {"api_server", "launcher", "engine_core", "worker", "coordinator", "sidecar"}
)
# An entry's size follows its image's tokens: for images of very different sizes they explain more than the number.
_FILLED_BY: Final[frozenset[GrowthDriver]] = frozenset({"new_image", "image", "1k_tokens"})


def host_series(reading: HostReading, *, idle_seconds: float, ranks: Iterable[RankReading] = ()) -> Iterator[Measured]:
    """Yield each process's memory, descriptors and threads, and the used bytes of ``/dev/shm``.

    The present idle period, or window of load, has lasted for ``idle_seconds``: older figures are of before it. The
    caches of ``ranks`` may lie on the host.
    """
    cache = _processor_cache(reading)
    rank_of = {life_of(rank.host, rank.pid, rank.pid_started): rank for rank in ranks}
    room, limit_by = _room(reading)
    for process in reading.processes:
        if process.role not in _ROLES or process.age_seconds >= idle_seconds:
            continue
        life = life_of(process.host, process.pid, process.started)
        rank = rank_of.get(life)
        own_bytes = _own_bytes(process.anonymous_bytes, rank, idle_seconds)
        files, most_files = process.descriptors, process.descriptors_limit
        left_files = None if files is None or most_files is None else float(max(0, most_files - files))
        files_by = None if left_files is None else "the process's limit of open files"
        for measure, value, bounds, left, what in (
            ("anonymous_bytes", own_bytes, tuple(_bounds(process, cache, rank)), room, limit_by),
            ("descriptors", files, (), left_files, files_by),
            ("threads", process.threads, (), None, None),
        ):
            if value is not None:
                unit: GrowthUnit = "bytes" if measure.endswith("_bytes") else "count"
                key = SeriesKey(process.name, measure, "host", unit, life)
                yield Measured(key=key, value=float(value), bounds=bounds, room=left, limit_by=what)
    shm = reading.shm
    if shm is not None and shm.used_bytes is not None and shm.age_seconds < idle_seconds and reading.processes:
        first = reading.processes[0]
        life = life_of(first.host, first.pid, first.started)
        is_cache = cache is not None and reading.engine is not None and reading.engine.mm_processor_cache_type == "shm"
        yield Measured(
            key=SeriesKey("/dev/shm", "used_bytes", "host", "bytes", life),  # noqa: S108 - its name
            value=float(shm.used_bytes),
            bounds=(cache,) if cache is not None and is_cache else (),
            room=None if shm.free_bytes is None else float(shm.free_bytes),
            limit_by="the room in /dev/shm",
        )


def _own_bytes(size: int | None, rank: RankReading | None, idle_seconds: float) -> int | None:
    """Return a process's memory, a CPU worker's without its encoder cache; ``None`` if that is older.

    The cache is a series of its own, with a bound. Here it would look like a leak, or add to the rate of a real one.
    """
    if size is None or rank is None or rank.device.type != "cpu":
        return size
    cache = rank.encoder_cache
    if rank.age_seconds >= idle_seconds:
        return None
    return size if cache is None else max(0, size - cache.device_bytes - cache.host_bytes)


def _bounds(process: ProcessMemory, cache: Bound | None, rank: RankReading | None) -> Iterator[Bound]:
    """Yield the limits of growth by design: a processor cache, and spilled encoder outputs."""
    if cache is not None and process.role in {"api_server", "engine_core"}:
        yield cache
    if rank is not None and rank.encoder_cache is not None and rank.encoder_cache.host_bytes:
        budget = encoder_cache_bound(rank)
        if budget is not None and rank.device.type != "cpu":
            yield replace(budget, drivers=_FILLED_BY, is_above_start=True)


def _processor_cache(reading: HostReading) -> Bound | None:
    engine = reading.engine
    if engine is None or not engine.is_multimodal or not engine.mm_processor_cache_gb:
        return None
    limit = float(int(engine.mm_processor_cache_gb * GIB))
    return Bound(limit=limit, what="the processor cache's limit", drivers=_FILLED_BY, is_above_start=True)


def _room(reading: HostReading) -> tuple[float | None, str | None]:
    """Return how much more host memory can be had, and the limit in words."""
    container = reading.container
    if container is not None and container.room_bytes is not None:
        return float(container.room_bytes), "the container's memory limit"
    available = reading.machine.available_bytes
    return (None, None) if available is None else (float(available), "the memory of its machine")
