"""Series of memory: those on devices as of a report, each process of the engine, ``/dev/shm``. Pure; no I/O, no clock.

Values are without releasable bytes: an allocator's reserve is no growth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from highwater.growth.floors import Bound
from highwater.host.reading import HostReading, ProcessMemory, Role
from highwater.model.components import COMPONENTS
from highwater.model.growth import GrowthDriver, GrowthUnit
from highwater.model.rank import Process, RankReading
from highwater.model.units import GIB

Place: TypeAlias = Literal["device", "host", "asleep"]


_ON_FRAGMENTS: Final = (
    "start the engine with PYTORCH_NPU_ALLOC_CONF=expandable_segments:True, which its process lacks: without it images "
    "of mixed sizes fragment the memory below PyTorch's allocator, and this grows; it excludes max_split_size_mb, "
    "garbage_collection_threshold and sleep mode"
)
_WHILE_ASLEEP: Final = (
    'POST /memory/reclaim {"remedies": ["release"]} while the engine sleeps: no request runs then, and what a wake-up '
    "allocated anew and the sleep did not free is given back"
)


class SeriesKey(NamedTuple):
    """One series, of one process's life: ``rank 0``, ``other_tensors_bytes``.

    The life is the process's machine, pid and start: a pid that is used again is another process.
    """

    owner: str
    measure: str
    place: Place
    unit: GrowthUnit
    life: str

    @property
    def name(self) -> str:
        return f"{self.owner} {self.measure}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One series at one moment.

    Attributes:
        bounds: The limits of its growth by design.
        room: The rest up to the limit that it grows towards, ``limit_by``; ``None`` where no limit is known.
        advice: The first thing to do where it grows.
    """

    key: SeriesKey
    value: float
    bounds: tuple[Bound, ...] = ()
    room: float | None = None
    limit_by: str | None = None
    advice: str | None = None


def life_of(process: Process) -> str:
    """Return an identity that no later process of this pid has, and none on other machines."""
    return "/".join(map(str, process))


def device_series(rank: RankReading) -> Iterator[Measured]:
    bound = encoder_cache_bound(rank)
    is_fragmented = rank.may_fragment and rank.launch.expandable_segments is False
    for component in COMPONENTS:
        size = getattr(rank.components, component.name)
        if size is None:
            continue
        if component.name == "torch_cached_bytes":
            size -= min(rank.releasable_bytes or 0, size)
        yield Measured(
            key=_rank_key(rank, component.name, "device"),
            value=float(size),
            bounds=() if bound is None or component.name != "encoder_cache_bytes" else (bound,),
            room=None if rank.free_bytes is None else float(rank.free_bytes + (rank.releasable_bytes or 0)),
            limit_by=f"the memory of its {'machine' if rank.device.traits.is_host_memory else 'device'}",
            advice=_ON_FRAGMENTS if component.name == "non_torch_bytes" and is_fragmented else None,
        )


def asleep_series(rank: RankReading) -> Iterator[Measured]:
    """Yield what is in use on a rank's device while the engine sleeps: what a sleep leaves behind.

    Other processes may use what the sleep gave up: as the driver's figure has them all, growth of theirs is seen here
    too, and the device is the limit of both.
    """
    if rank.used_bytes is None or rank.device.traits.is_host_memory:
        return
    yield Measured(
        key=_rank_key(rank, "used_asleep_bytes", "asleep"),
        value=float(rank.used_bytes),
        room=None if rank.free_bytes is None else float(rank.free_bytes),
        limit_by="the memory of its device",
        advice=_WHILE_ASLEEP,
    )


def _rank_key(rank: RankReading, measure: str, place: Place) -> SeriesKey:
    life = life_of(rank.process)
    return SeriesKey(rank.name, measure, place, "bytes", life)


def encoder_cache_bound(rank: RankReading) -> Bound | None:
    limit = None if rank.encoder_cache is None else rank.encoder_cache.budget_bytes
    return None if limit is None else Bound(limit=limit, what="the encoder cache's budget")


# --- the host ---

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
    rank_of = {rank.process: rank for rank in ranks}
    room, limit_by = _room(reading)
    for process in reading.processes:
        if process.role not in _ROLES or process.age_seconds >= idle_seconds:
            continue
        life, rank = life_of(process.process), rank_of.get(process.process)
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
        life = life_of(reading.processes[0].process)
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
    if size is None or rank is None or not rank.device.traits.is_host_memory:
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
        if budget is not None and not rank.device.traits.is_host_memory:
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
