"""Series of memory, and those on devices as of a report. Pure; no I/O, no clock.

Values are without releasable bytes: an allocator's reserve is no growth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from highwater.accounting.components import COMPONENTS
from highwater.accounting.encoder_cache import budget_bytes
from highwater.accounting.launch import may_fragment
from highwater.growth.floors import Bound
from highwater.readings.growth import GrowthUnit
from highwater.readings.rank import RankReading
from highwater.text.table import rank_title

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


def life_of(host: str | None, pid: int | None, started: int | None) -> str:
    """Return an identity that no later process of this pid has, and none on other machines."""
    return f"{host}/{pid}/{started}"


def device_series(rank: RankReading) -> Iterator[Measured]:
    bound = encoder_cache_bound(rank)
    is_fragmented = may_fragment(rank) and rank.launch.expandable_segments is False
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
            limit_by="the memory of its device" if rank.device.type != "cpu" else "the memory of its machine",
            advice=_ON_FRAGMENTS if component.name == "non_torch_bytes" and is_fragmented else None,
        )


def asleep_series(rank: RankReading) -> Iterator[Measured]:
    """Yield what is in use on a rank's device while the engine sleeps: what a sleep leaves behind.

    Other processes may use what the sleep gave up: as the driver's figure has them all, growth of theirs is seen here
    too, and the device is the limit of both.
    """
    if rank.used_bytes is None or rank.device.type == "cpu":
        return
    yield Measured(
        key=_rank_key(rank, "used_asleep_bytes", "asleep"),
        value=float(rank.used_bytes),
        room=None if rank.free_bytes is None else float(rank.free_bytes),
        limit_by="the memory of its device",
        advice=_WHILE_ASLEEP,
    )


def _rank_key(rank: RankReading, measure: str, place: Place) -> SeriesKey:
    life = life_of(rank.host, rank.pid, rank.pid_started)
    return SeriesKey(f"rank {rank_title(rank.dp_rank, rank.rank)}", measure, place, "bytes", life)


def encoder_cache_bound(rank: RankReading) -> Bound | None:
    limit = budget_bytes(rank.encoder_cache)
    return None if limit is None else Bound(limit=limit, what="the encoder cache's budget")
