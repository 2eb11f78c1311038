"""The devices that ranks are on, and their memory, each device counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from highwater.accounting.rank_key import rank_key
from highwater.readings.rank import RankReading, WorkerMemory
from highwater.units import sum_known


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


def used_total(ranks: Iterable[RankReading]) -> int | None:
    """Return the used bytes of all devices, each counted once, other programs included."""
    return once_per_card((card(rank), rank.used_bytes) for rank in ranks)


def device_total(ranks: Iterable[RankReading]) -> int | None:
    return once_per_card((card(rank), rank.total_bytes) for rank in ranks)


def first_of_each_card(ranks: Sequence[RankReading]) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for position, rank in enumerate(ranks):
        if rank.used_bytes is not None:
            first.setdefault(card(rank), position)
    return tuple(first.values())


def once_per_card(sizes: Iterable[tuple[str | None, int | None]]) -> int | None:
    first: dict[object, int] = {}
    for name, size in sizes:
        if size is not None:
            first.setdefault(object() if name is None else name, size)
    return sum_known(first.values())
