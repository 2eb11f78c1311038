"""Series of memory, and their floors: the values while no request runs or waits, or the lowest ones under load. Pure.

Series are those on devices as of a report, each process of the engine, ``/dev/shm``; without releasable bytes: an
allocator's reserve is no growth. Idle floors are the better evidence: under load a series shows the load. An engine
that is never idle has only the lowest value of each window of some seconds, which counts beside windows with as much
work. Floors are thinned by age, so that a day fits into a bounded number of them: the older, the further apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Final, Literal, NamedTuple, TypeAlias

from highwater.host.reading import HostReading, Role
from highwater.model.components import COMPONENTS
from highwater.model.growth import GrowthDriver, GrowthGround, GrowthUnit
from highwater.model.rank import Process, RankReading
from highwater.model.units import GIB, HOUR_SECONDS, KIB, MIB

MAX_FLOORS: Final = 240
_NEWEST_KEPT, _OLDEST_KEPT = 48, 4
# PyTorch's counts settle once a step has ended; heaps and the kernel free memory late.
DEVICE_IDLE_SECONDS: Final = 3.0
HOST_IDLE_SECONDS: Final = 12.0
# In a long idle period a floor is taken this often, because leaks without requests show there.
REPEAT_SECONDS: Final = 60.0
# A window's length: a process may write its figures each ten seconds only. How often the host is read for it.
WINDOW_SECONDS: Final = 15.0
HOST_SAMPLE_SECONDS: Final = 5.0
# Windows have equal work if the requests in them differ from the usual number by a quarter, or by two.
EQUAL_SHARE, EQUAL_REQUESTS = 0.25, 2.0
KILO: Final = 1000.0


class Floor(NamedTuple):
    """One value of a series, in bytes or a count, and the work until then (``WorkCounts``); NaN: not known.

    ``at`` is in monotonic seconds since the machine's boot, ``wall`` in Unix seconds; ``in_flight`` are the requests
    that ran or waited on average of a window, NaN for an idle floor.
    """

    at: float
    wall: float
    value: float
    requests: float = math.nan
    images: float = math.nan
    new_images: float = math.nan
    tokens: float = math.nan
    sleeps: float = math.nan
    in_flight: float = math.nan

    def progress(self, driver: GrowthDriver) -> float:
        """Return the driver's count so far, in its own unit; NaN where it is not known."""
        if driver == "hour":
            return self.at / HOUR_SECONDS
        if driver == "1k_tokens":
            return self.tokens / KILO
        return self[_FIELDS[driver]]


_FIELDS: Final[Mapping[str, int]] = {"request": 3, "image": 4, "new_image": 5, "sleep": 7}


class Scale(NamedTuple):
    """A unit's smallest growth, and the grain: differences of this size are the allocator's, or the kernel's.

    Of windows under load (``is_loaded``) the interval of a slope is so many times as wide as Kendall's, because
    neighbouring windows share requests.
    """

    min_growth: float
    grain: float
    is_loaded: bool = False
    widening: float = 1.0


SCALES: Final[Mapping[tuple[GrowthUnit, GrowthGround], Scale]] = {
    ("bytes", "idle_floors"): Scale(min_growth=float(MIB), grain=64.0 * KIB),
    ("count", "idle_floors"): Scale(min_growth=16.0, grain=0.5),
    ("bytes", "equal_work"): Scale(min_growth=16.0 * MIB, grain=64.0 * KIB, is_loaded=True, widening=2.0),
    ("count", "equal_work"): Scale(min_growth=16.0, grain=0.5, is_loaded=True, widening=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An upper limit of growth by design.

    Attributes:
        limit: The value up to which growth is by design; with ``is_above_start`` the most that the series may grow.
        what: The limit in words: ``encoder cache budget``.
        drivers: Growth that follows other drivers is not by this design; empty: any driver.
    """

    limit: float
    what: str
    drivers: frozenset[GrowthDriver] = frozenset()
    is_above_start: bool = False

    def from_start(self, value: float) -> Bound:
        """Return the bound as a value of the series, by what it was at its start."""
        return replace(self, limit=self.limit + value, is_above_start=False) if self.is_above_start else self


class Happening(NamedTuple):
    """An event that may have made a step, or lowered the series by a reset; ``at`` as in a floor."""

    at: float
    what: str
    is_reset: bool = False


def superfluous(times: Sequence[float]) -> int:
    """Return the index of the floor to drop by their times, oldest first: its gap is the smallest for its age.

    The newest and the first few are kept, because verdicts compare with the start of a series: there are more than
    ``_NEWEST_KEPT + _OLDEST_KEPT``.
    """
    now = times[-1]
    middle = range(_OLDEST_KEPT, len(times) - _NEWEST_KEPT)
    return min(middle, key=lambda i: (times[i + 1] - times[i - 1]) / max(now - times[i], 1.0))


def binned(floors: Sequence[Floor], most: int) -> list[Floor]:
    """Return at most so many floors, each the median of its neighbours; outliers are dropped."""
    if len(floors) <= most:
        return list(floors)
    edges = [round(i * len(floors) / most) for i in range(most + 1)]
    parts = (floors[low:high] for low, high in pairwise(edges))
    return [sorted(part, key=attrgetter("value"))[(len(part) - 1) // 2] for part in parts]


def of_equal_work(floors: Sequence[Floor]) -> list[Floor]:
    """Return the windows in which about as many requests ran and waited as in most of them."""
    usual = median(floor.in_flight for floor in floors) if floors else 0.0
    most = max(EQUAL_SHARE * usual, EQUAL_REQUESTS)
    return [floor for floor in floors if abs(floor.in_flight - usual) <= most]


# --- the series ---

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
            key=SeriesKey(rank.name, component.name, "device", "bytes", life_of(rank.process)),
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
        key=SeriesKey(rank.name, "used_asleep_bytes", "asleep", "bytes", life_of(rank.process)),
        value=float(rank.used_bytes),
        room=None if rank.free_bytes is None else float(rank.free_bytes),
        limit_by="the memory of its device",
        advice=_WHILE_ASLEEP,
    )


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


def host_series(reading: HostReading, *, idle_seconds: float, ranks: Iterable[RankReading]) -> Iterator[Measured]:
    """Yield each process's memory, descriptors and threads, and the used bytes of ``/dev/shm``.

    The present idle period, or window of load, has lasted for ``idle_seconds``: older figures are of before it. The
    caches of ``ranks`` may lie on the host.
    """
    engine, cache = reading.engine, None
    if engine is not None and engine.is_multimodal and engine.mm_processor_cache_gb:
        limit = float(int(engine.mm_processor_cache_gb * GIB))
        cache = Bound(limit=limit, what="the processor cache's limit", drivers=_FILLED_BY, is_above_start=True)
    rank_of = {rank.process: rank for rank in ranks}
    # How much more host memory can be had, and the limit in words.
    container = reading.container
    room, limit_by = reading.machine.available_bytes, "the memory of its machine"
    if container is not None and container.room_bytes is not None:
        room, limit_by = container.room_bytes, "the container's memory limit"
    for process in reading.processes:
        if process.role not in _ROLES or process.age_seconds >= idle_seconds:
            continue
        life, rank = life_of(process.process), rank_of.get(process.process)
        own_bytes = _own_bytes(process.anonymous_bytes, rank, idle_seconds)
        by_design = [cache] if cache is not None and process.role in {"api_server", "engine_core"} else []
        if rank is not None and rank.encoder_cache is not None and rank.encoder_cache.host_bytes:
            budget = encoder_cache_bound(rank)  # of spilled outputs
            if budget is not None and not rank.device.traits.is_host_memory:
                by_design.append(replace(budget, drivers=_FILLED_BY, is_above_start=True))
        files, most_files = process.descriptors, process.descriptors_limit
        left_files = None if files is None or most_files is None else float(max(0, most_files - files))
        for measure, value, bounds, left, what in (
            ("anonymous_bytes", own_bytes, tuple(by_design), room, limit_by),
            ("descriptors", files, (), left_files, "the process's limit of open files"),
            ("threads", process.threads, (), None, None),
        ):
            if value is not None:
                unit: GrowthUnit = "bytes" if measure.endswith("_bytes") else "count"
                key = SeriesKey(process.name, measure, "host", unit, life)
                yield Measured(
                    key=key, value=float(value), bounds=bounds, room=left, limit_by=what if left is not None else None
                )
    shm = reading.shm
    if shm is not None and shm.used_bytes is not None and shm.age_seconds < idle_seconds and reading.processes:
        life = life_of(reading.processes[0].process)
        is_cache = engine is not None and engine.mm_processor_cache_type == "shm"
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
