"""Series of host memory: each process of the engine, and ``/dev/shm``. Pure; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from highwater.growth.floors import Bound
from highwater.growth.series import Measured, SeriesKey, encoder_cache_bound, life_of
from highwater.host.reading import HostReading, ProcessMemory, Role
from highwater.readings import GrowthDriver, GrowthUnit, RankReading
from highwater.units import GIB

_MEASURES: Final[tuple[tuple[str, GrowthUnit], ...]] = (
    ("anonymous_bytes", "bytes"),
    ("descriptors", "count"),
    ("threads", "count"),
)
# Other processes of the container come and go; whoever wants to know of them reads /memory/host.
_ROLES: Final[frozenset[Role]] = frozenset(
    {"api_server", "launcher", "engine_core", "worker", "coordinator", "sidecar"}
)
# An entry's size goes with its image's tokens: of images of very different sizes the tokens tell more than the number.
_FILLED_BY: Final[frozenset[GrowthDriver]] = frozenset({"new_image", "image", "1k_tokens"})
_PROCESSOR_CACHE: Final = "the processor cache's limit"


def host_series(reading: HostReading, *, rest_seconds: float, ranks: Iterable[RankReading] = ()) -> Iterator[Measured]:
    """Yield each process's memory, descriptors and threads, and what ``/dev/shm`` holds.

    Args:
        reading: Taken in the present rest.
        rest_seconds: For how long it has lasted: older figures are of a time with requests.
        ranks: The workers, whose encoder caches may lie on the host.
    """
    cache = _cache_bytes(reading)
    rank_of = {life_of(rank.host, rank.pid, rank.pid_started): rank for rank in ranks}
    room, limit_by = _room(reading)
    for process in reading.processes:
        if process.role not in _ROLES or process.age_seconds >= rest_seconds:
            continue
        life = life_of(process.host, process.pid, process.started)
        rank = rank_of.get(life)
        own_bytes = _own_bytes(process.anonymous_bytes, rank, rest_seconds)
        for measure, unit in _MEASURES:
            value = own_bytes if measure == "anonymous_bytes" else getattr(process, measure)
            if value is None:
                continue
            left, what = (room, limit_by) if unit == "bytes" else (None, None)
            if measure == "descriptors" and process.descriptors_limit is not None:
                left, what = float(max(0, process.descriptors_limit - value)), "the process's limit of open files"
            yield Measured(
                key=SeriesKey(process.name, measure, "host", unit, life),
                value=float(value),
                bounds=_bounds(process, cache, rank) if measure == "anonymous_bytes" else (),
                room=left,
                limit_by=what,
            )
    shm = reading.shm
    if shm is not None and shm.used_bytes is not None and shm.age_seconds < rest_seconds and reading.processes:
        first = reading.processes[0]
        life = life_of(first.host, first.pid, first.started)
        is_cache = cache is not None and reading.engine is not None and reading.engine.mm_processor_cache_type == "shm"
        yield Measured(
            key=SeriesKey("/dev/shm", "used_bytes", "host", "bytes", life),  # noqa: S108 - its name
            value=float(shm.used_bytes),
            bounds=(_bound(cache),) if is_cache and cache is not None else (),
            room=None if shm.free_bytes is None else float(shm.free_bytes),
            limit_by="the room in /dev/shm",
        )


def _own_bytes(size: int | None, rank: RankReading | None, rest_seconds: float) -> int | None:
    """Return what a process holds, a worker on a CPU beside its encoder cache; ``None`` where this rest shows neither.

    The cache is a series of its own, with a bound. Here it would pass for a leak, or add to the rate of a real one.
    """
    if size is None or rank is None or rank.device.type != "cpu":
        return size
    cache = rank.encoder_cache
    if rank.age_seconds >= rest_seconds:
        return None
    return size if cache is None else max(0, size - cache.device_bytes - cache.host_bytes)


def _bounds(process: ProcessMemory, cache: int | None, rank: RankReading | None) -> tuple[Bound, ...]:
    """Return up to where a process may grow by design: by a processor cache, and by spilled encoder outputs."""
    bounds = []
    if cache is not None and process.role in {"api_server", "engine_core"}:
        bounds.append(_bound(cache))
    if rank is not None and rank.encoder_cache is not None and rank.encoder_cache.host_bytes:
        budget = encoder_cache_bound(rank)
        if budget is not None and rank.device.type != "cpu":
            bounds.append(replace(budget, drivers=_FILLED_BY, is_above_start=True))
    return tuple(bounds)


def _cache_bytes(reading: HostReading) -> int | None:
    engine = reading.engine
    if engine is None or not engine.is_multimodal or not engine.mm_processor_cache_gb:
        return None
    return int(engine.mm_processor_cache_gb * GIB)


def _bound(cache: int) -> Bound:
    return Bound(limit=float(cache), what=_PROCESSOR_CACHE, drivers=_FILLED_BY, is_above_start=True)


def _room(reading: HostReading) -> tuple[float | None, str | None]:
    """Return how much more host memory there is, and which limit that is."""
    container = reading.container
    if container is not None and container.room_bytes is not None:
        return float(container.room_bytes), "the container's memory limit"
    available = reading.machine.available_bytes
    return (None, None) if available is None else (float(available), "the memory of its machine")
