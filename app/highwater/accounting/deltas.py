"""The difference between two readings of the same ranks, by rank and in all."""

from __future__ import annotations

from collections.abc import Sequence

from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.devices import card, once_per_card
from highwater.accounting.rank_key import rank_key
from highwater.readings.rank import Components, RankReading
from highwater.readings.remedy import RankDelta
from highwater.units import difference, sum_known


def compare(before: Sequence[RankReading], after: Sequence[RankReading]) -> tuple[RankDelta, ...]:
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
    used = once_per_card((delta.card, delta.used_bytes) for delta in deltas)
    cards = [delta.card for delta in deltas if delta.card is not None]
    if used is not None and len(set(cards)) < len(cards):
        # On each of several ranks on one device, what the others own stands under non_torch.
        parts["non_torch_bytes"] = used - sum(parts[name] or 0 for name in COMPONENT_NAMES if name != "non_torch_bytes")
    return used, Components(**parts)
