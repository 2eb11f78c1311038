"""Bytes that a remedy freed, of its own component, on each rank; never negative.

The difference between two readings is traffic's as much as the remedy's. So a remedy is credited with its own
components alone: a trim without a result gets no credit for the release after it. The event, ``/policy`` and the metric
show this one figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.rank_key import key_of, rank_key
from highwater.accounting.remedies import TRAITS, RemedyTraits
from highwater.readings.policy import RankFreed
from highwater.readings.rank import Components, RankReading
from highwater.units import difference, sum_known


@dataclass(frozen=True, slots=True)
class Credit:
    ranks: tuple[RankFreed, ...]  # those that were read before and after it
    components: Components  # over all ranks; `None` for those that it cannot free

    @property
    def freed_bytes(self) -> int | None:
        return sum(one.freed_bytes or 0 for one in self.ranks) if self.ranks else None


def credit(
    remedy: str,
    before: Sequence[RankReading],
    after: Sequence[RankReading],
    detail: Sequence[Mapping[str, Any]] = (),
    *,
    is_released: bool = True,
) -> Credit:
    """Credit a remedy, given by its name, with what it freed.

    Of the workers' responses (``detail``) the figure of a release counts: it measures in the call, before the engine
    goes on. Without ``is_released`` what left the encoder cache is the allocator's now, and the device has gained
    nothing.
    """
    traits = TRAITS[remedy]
    earlier = {rank_key(reading): reading for reading in before}
    reported = {
        key_of(response.get("dp_rank"), response.get("rank")): max(size, 0)
        for response in detail
        if isinstance(size := response.get("freed_bytes"), int)
    }
    parts = {
        rank_key(now): _parts(traits, earlier[rank_key(now)], now, reported.get(rank_key(now)), is_released=is_released)
        for now in after
        if rank_key(now) in earlier
    }
    ranks = tuple(
        # 0 for a remedy that frees no device memory.
        RankFreed(rank=now.rank, dp_rank=now.dp_rank, freed_bytes=sum_known(sizes.values()) if sizes else 0)
        for now in after
        if (sizes := parts.get(rank_key(now))) is not None
    )
    sums = {name: sum_known(sizes.get(name) for sizes in parts.values()) for name in COMPONENT_NAMES}
    return Credit(ranks, Components(**sums))


def _parts(
    remedy: RemedyTraits, was: RankReading, now: RankReading, reported: int | None, *, is_released: bool
) -> dict[str, int | None]:
    def left(component: str) -> int | None:
        return difference(getattr(was.components, component), getattr(now.components, component))

    sizes = {component: left(component) for component in remedy.credited_components(was.device.type)}
    if remedy.needs_release and not is_released:
        kept = max(-(left("torch_cached_bytes") or 0), 0)
        sizes = {component: difference(size, kept) for component, size in sizes.items()}
    gains = {component: None if size is None else max(size, 0) for component, size in sizes.items()}
    return _as_reported(gains, reported) if remedy.has_own_figure else gains


def _as_reported(sizes: dict[str, int | None], reported: int | None) -> dict[str, int | None]:
    if reported is None:
        return sizes
    *names, last = sizes
    credited: dict[str, int | None] = {}
    for name in names:
        credited[name] = min(sizes[name] or 0, reported)
        reported -= credited[name] or 0
    return {**credited, last: reported}
