"""Accounting of a worker's memory: exclusive components that sum to the used bytes. Pure; no I/O, no clock.

The parts are placed one after another into ``used_bytes`` and never overfill it: a part that does not fit
(PyTorch's statistics and the driver's are not read at the same instant; a sleeping engine has unmapped pools that
PyTorch still counts) is cut, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from statistics import linear_regression
from types import MappingProxyType
from typing import Protocol, TypeAlias

from highwater.readings.growth import Growth, RankGrowth
from highwater.readings.rank import (
    Budget,
    Components,
    EncoderCacheTotals,
    Note,
    RankMemory,
    RankReading,
    ReadingSource,
    WorkerMemory,
)
from highwater.readings.remedy import RankDelta
from highwater.units import KIB

COMPONENT_NAMES = tuple(field.name for field in fields(Components))
_SHARED = tuple(field.name for field in fields(RankMemory))
# Slower growth is noise, further away is no forecast, and fewer seconds show the steps rather than where they lead.
SLOWEST_BYTES_PER_SECOND = 64 * KIB
HORIZON_SECONDS = 86_400.0
MIN_PACE_SECONDS = 15.0

RankKey: TypeAlias = tuple[int, int]
# When, and how many bytes were used then; oldest first.
Points: TypeAlias = Sequence[tuple[float, float]]


class Ranked(Protocol):
    """A value of one rank; ``dp_rank`` is the data-parallel engine that numbers it."""

    @property
    def rank(self) -> int | None:
        """The rank."""

    @property
    def dp_rank(self) -> int | None:
        """The engine."""


def account(worker: WorkerMemory, source: ReadingSource = "rpc") -> RankReading:
    """Return a worker's memory as a reading whose known components sum to ``used_bytes`` exactly."""
    components, notes = _place(worker)
    shared = {name: getattr(worker, name) for name in _SHARED}
    has_ratio = worker.used_bytes is not None and worker.total_bytes
    return RankReading(
        **shared | {"notes": worker.notes + notes},
        used_ratio=(worker.used_bytes or 0) / (worker.total_bytes or 1) if has_ratio else None,
        components=components,
        budget=Budget(
            gpu_memory_utilization=worker.budget.gpu_memory_utilization,
            requested_bytes=worker.budget.requested_bytes,
            headroom_bytes=worker.free_bytes,
        ),
        source=source,
    )


def _place(worker: WorkerMemory) -> tuple[Components, tuple[Note, ...]]:
    encoder = worker.encoder_cache.device_bytes if worker.encoder_cache is not None else None
    known = {
        "weights_bytes": worker.weights_bytes,
        "encoder_cache_bytes": encoder,
        "kv_cache_bytes": worker.kv_cache_bytes,
    }
    if worker.used_bytes is None:
        return Components(**known), (Note(name="used_bytes", reason="not known, so the components cannot be summed"),)

    unknown = [name for name in ("weights_bytes", "kv_cache_bytes") if known[name] is None]
    parts = dict(known) | _allocator_parts(worker, sum(size or 0 for size in known.values()), placed_all=not unknown)
    notes = [_unplaced(name) for name in unknown]
    placed: dict[str, int | None] = {}
    left = worker.used_bytes
    for name, size in parts.items():
        if size is None:
            placed[name] = None
            continue
        placed[name] = min(max(size, 0), left)
        left -= placed[name] or 0
        if size > (placed[name] or 0):
            notes.append(Note(name=name, reason=f"{size} bytes counted, of which only {placed[name]} fit into used"))
    return Components(**placed, non_torch_bytes=left), tuple(notes)


def _unplaced(name: str) -> Note:
    return Note(name=name, reason="not known for this worker; its bytes stand under non_torch_bytes")


def _allocator_parts(worker: WorkerMemory, placed: int, *, placed_all: bool) -> dict[str, int | None]:
    """Return what PyTorch's allocator holds beyond the known parts: other live tensors, and its reserve.

    Where weights or KV pool are unknown, they cannot be distinguished from other tensors, which stay ``None``.
    """
    allocated, reserved = worker.torch.allocated_bytes, worker.torch.reserved_bytes
    if allocated is None or reserved is None:
        return {"other_tensors_bytes": None, "torch_cached_bytes": None}
    return {
        "other_tensors_bytes": max(allocated - placed, 0) if placed_all else None,
        "torch_cached_bytes": max(reserved - allocated, 0),
    }


def rank_key(reading: Ranked) -> RankKey:
    """Return what identifies a worker across readings; data-parallel engines number their ranks from 0 each."""
    return (reading.dp_rank or 0, reading.rank or 0)


def card(reading: RankReading) -> str:
    """Return a key that two ranks have in common if they are on one device, and only then.

    On CPU each rank counts its own process's memory, so that no two of them share any. Where a device's identity and
    number on its machine are unknown, two of the same index may be two devices: in two engines each sees its own as 0.
    """
    return device_id(reading) or "rank {}.{}".format(*rank_key(reading))


def device_id(reading: RankReading | WorkerMemory) -> str | None:
    """Return the device's identity on its machine; ``None`` where it is unknown, and on CPU."""
    device = reading.device
    if device.uuid is not None:
        return f"{reading.host}/{device.uuid}"
    if device.physical_index is not None:
        return f"{reading.host}/{device.type}:{device.physical_index}"
    return None


def compare(before: Sequence[RankReading], after: Sequence[RankReading]) -> tuple[RankDelta, ...]:
    """Return what changed on each rank that is in both; a component unknown at either end is ``None``."""
    earlier = {rank_key(reading): reading for reading in before}
    return tuple(
        RankDelta(
            rank=now.rank,
            dp_rank=now.dp_rank,
            card=card(now),
            used_bytes=difference(now.used_bytes, was.used_bytes),
            components=Components(
                **{
                    name: difference(getattr(now.components, name), getattr(was.components, name))
                    for name in COMPONENT_NAMES
                }
            ),
        )
        for now in after
        if (was := earlier.get(rank_key(now))) is not None
    )


def freed(before: Sequence[RankReading], after: Sequence[RankReading]) -> tuple[RankDelta, ...]:
    """Return what each rank gave back; negative where traffic took more meanwhile."""
    return compare(after, before)


def total(deltas: Sequence[RankDelta]) -> tuple[int | None, Components]:
    """Return the sum over the ranks: used bytes, each device's once, and by component."""
    parts = {name: sum_known(getattr(delta.components, name) for delta in deltas) for name in COMPONENT_NAMES}
    used = _once_per_card((delta.card, delta.used_bytes) for delta in deltas)
    cards = [delta.card for delta in deltas if delta.card is not None]
    if used is not None and len(set(cards)) < len(cards):
        # On each of several ranks on one device, what the others own stands under non_torch.
        parts["non_torch_bytes"] = used - sum(parts[name] or 0 for name in COMPONENT_NAMES if name != "non_torch_bytes")
    return used, Components(**parts)


def encoder_totals(ranks: Sequence[RankReading]) -> EncoderCacheTotals | None:
    """Return the encoder cache over all ranks; ``None`` where no rank has one (text-only models)."""
    caches = [rank.encoder_cache for rank in ranks if rank.encoder_cache is not None]
    if not caches:
        return None
    return EncoderCacheTotals(
        entries=max(cache.entries for cache in caches),
        device_bytes=sum(cache.device_bytes for cache in caches),
        host_bytes=sum(cache.host_bytes for cache in caches),
        capacity_embeds=max((c.capacity_embeds for c in caches if c.capacity_embeds is not None), default=None),
        oldest_age_seconds=max(
            (c.oldest_age_seconds for c in caches if c.oldest_age_seconds is not None), default=None
        ),
        spills=max(cache.spills for cache in caches),
        restores=max(cache.restores for cache in caches),
        restore_seconds=max(cache.restore_seconds for cache in caches),
    )


def growth(
    baseline: Sequence[RankReading],
    ranks: Sequence[RankReading],
    recent: Points,
    recent_by_rank: Mapping[RankKey, Points] = MappingProxyType({}),
) -> Growth:
    """Return the growth since ``baseline``, the slope over ``recent``, and when each device is full.

    ``baseline`` are the first readings after the engine became ready; ``recent`` the used bytes of the last minute,
    over all ranks and by rank.
    """
    grown, _ = total(compare(baseline, ranks))
    filling = tuple(_filling(rank, recent_by_rank.get(rank_key(rank), ())) for rank in ranks)
    return Growth(
        seconds_to_full=min((one.seconds_to_full for one in filling if one.seconds_to_full is not None), default=None),
        ranks=filling,
        since_ready_bytes=grown,
        bytes_per_second=_slope(recent),
        host_since_ready_bytes=_rss_growth(baseline, ranks),
        baseline_taken_at=min((reading.taken_at for reading in baseline), default=None),
    )


def seconds_until(
    room_bytes: float | None,
    bytes_per_second: float | None,
    *,
    slowest: float = SLOWEST_BYTES_PER_SECOND,
    horizon: float = HORIZON_SECONDS,
) -> float | None:
    """Return the seconds until so many bytes are used up; ``None`` where unknown, or beyond the horizon in seconds.

    Also where the pace is below ``slowest``, and thus noise.
    """
    if room_bytes is None or bytes_per_second is None or bytes_per_second < slowest:
        return None
    seconds = max(room_bytes, 0) / bytes_per_second
    return seconds if seconds <= horizon else None


def without_forecast(grown: Growth) -> Growth:
    """Return the growth without its forecast: old figures allow none."""
    return replace(grown, seconds_to_full=None, ranks=())


def _filling(rank: RankReading, recent: Points) -> RankGrowth:
    is_long = bool(recent) and recent[-1][0] - recent[0][0] >= MIN_PACE_SECONDS
    pace = _slope(recent) if is_long else None
    left = seconds_until(rank.free_bytes, pace)
    return RankGrowth(rank=rank.rank, dp_rank=rank.dp_rank, bytes_per_second=pace, seconds_to_full=left)


def used_total(ranks: Iterable[RankReading]) -> int | None:
    """Return the used bytes of all devices, each counted once, other programs included."""
    return _once_per_card((card(rank), rank.used_bytes) for rank in ranks)


def device_total(ranks: Iterable[RankReading]) -> int | None:
    """Return the memory of all devices, each counted once."""
    return _once_per_card((card(rank), rank.total_bytes) for rank in ranks)


def first_of_each_card(ranks: Sequence[RankReading]) -> tuple[int, ...]:
    """Return the positions of the first rank of each device whose used bytes are known."""
    first: dict[str, int] = {}
    for position, rank in enumerate(ranks):
        if rank.used_bytes is not None:
            first.setdefault(card(rank), position)
    return tuple(first.values())


def host_used(ranks: Sequence[RankReading]) -> int | None:
    """Return the host memory in use where the workers run: of the control group if it has a limit, else of the node."""
    return max((used for used, _ in map(host_share, ranks) if used is not None), default=None)


def host_share(rank: RankReading) -> tuple[int | None, int | None]:
    """Return ``(used, total)`` of this worker's host memory; ``None`` where unknown."""
    host = rank.host_memory
    if host.cgroup_limit_bytes and host.cgroup_used_bytes is not None:
        return host.cgroup_used_bytes, host.cgroup_limit_bytes
    if host.node_total_bytes and host.node_available_bytes is not None:
        return host.node_total_bytes - host.node_available_bytes, host.node_total_bytes
    return None, None


def host_ratio(rank: RankReading) -> float | None:
    """Return used over total of this worker's host memory."""
    used, total = host_share(rank)
    return used / total if used is not None and total else None


def _slope(points: Points) -> float | None:
    """Return the least-squares slope; ``None`` below three points, where it would only show noise."""
    if len(points) < 3 or points[0][0] == points[-1][0]:  # noqa: PLR2004 - a line through two points says nothing
        return None
    start = points[0][0]
    slope = linear_regression([at - start for at, _ in points], [size for _, size in points]).slope
    return slope if math.isfinite(slope) else None


def _rss_growth(baseline: Sequence[RankReading], ranks: Sequence[RankReading]) -> int | None:
    earlier = {rank_key(reading): reading.host_memory.rss_bytes for reading in baseline}
    return sum_known(difference(rank.host_memory.rss_bytes, earlier.get(rank_key(rank))) for rank in ranks)


def difference(now: int | None, was: int | None) -> int | None:
    """Return ``now - was``; ``None`` where either is unknown."""
    return None if now is None or was is None else now - was


def _once_per_card(sizes: Iterable[tuple[str | None, int | None]]) -> int | None:
    """Return the sum over devices of what the first rank of each reports; without a device a rank counts itself."""
    first: dict[object, int] = {}
    for name, size in sizes:
        if size is not None:
            first.setdefault(object() if name is None else name, size)
    return sum_known(first.values())


def sum_known(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of the known sizes; ``None`` without any."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
