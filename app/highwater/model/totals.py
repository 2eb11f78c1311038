"""Sums over ranks, each device counted once, and the difference between two readings of the same ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from highwater.model.components import COMPONENT_NAMES
from highwater.model.rank import Components, RankReading
from highwater.model.remedies import RankDelta
from highwater.model.units import difference, sum_known


def host_used(ranks: Sequence[RankReading]) -> int | None:
    return max((used for used, _ in (rank.host_memory.share for rank in ranks) if used is not None), default=None)


def used_total(ranks: Iterable[RankReading]) -> int | None:
    """Return the used bytes of all devices, each counted once, other programs included."""
    return once_per_card((rank.card, rank.used_bytes) for rank in ranks)


def device_total(ranks: Iterable[RankReading]) -> int | None:
    return once_per_card((rank.card, rank.total_bytes) for rank in ranks)


def first_of_each_card(ranks: Sequence[RankReading]) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for position, rank in enumerate(ranks):
        if rank.used_bytes is not None:
            first.setdefault(rank.card, position)
    return tuple(first.values())


def once_per_card(sizes: Iterable[tuple[str | None, int | None]]) -> int | None:
    first: dict[object, int] = {}
    for name, size in sizes:
        if size is not None:
            first.setdefault(object() if name is None else name, size)
    return sum_known(first.values())


def compare(before: Sequence[RankReading], after: Sequence[RankReading]) -> tuple[RankDelta, ...]:
    earlier = {reading.key: reading for reading in before}
    return tuple(
        RankDelta(
            rank=now.rank,
            dp_rank=now.dp_rank,
            card=now.card,
            used_bytes=difference(now.used_bytes, was.used_bytes),
            components=Components(
                **{
                    name: difference(getattr(now.components, name), getattr(was.components, name))
                    for name in COMPONENT_NAMES
                }
            ),
        )
        for now in after
        if (was := earlier.get(now.key)) is not None
    )


def freed(before: Sequence[RankReading], after: Sequence[RankReading]) -> tuple[RankDelta, ...]:
    """Return what each rank gave back; negative where traffic took more meanwhile."""
    return compare(after, before)


def total(deltas: Sequence[RankDelta]) -> tuple[int | None, Components]:
    """Return the sum over the ranks: used bytes, each device's once, and by component."""
    parts = {name: sum_known(getattr(delta.components, name) for delta in deltas) for name in COMPONENT_NAMES}
    used = once_per_card((delta.card, delta.used_bytes) for delta in deltas)
    cards = [delta.card for delta in deltas if delta.card is not None]
    if used is not None and len(set(cards)) < len(cards):
        # On each of several ranks on one device, what the others own stands under non_torch.
        parts["non_torch_bytes"] = used - sum(parts[name] or 0 for name in COMPONENT_NAMES if name != "non_torch_bytes")
    return used, Components(**parts)
