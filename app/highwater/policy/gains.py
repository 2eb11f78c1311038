"""The bytes that a remedy can give, by the workers' own figures, and those that it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from highwater.accounting.attribution import host_share, host_used, rank_key
from highwater.accounting.freed import credit
from highwater.policy.rules import HOST_SIGNALS
from highwater.policy.waters import reserve_bytes
from highwater.readings import RankFreed, RankReading, RemedyResult

# Product names of GPUs that share the machine's memory: moving encoder outputs to the host frees nothing there.
_INTEGRATED = ("GB10", "Jetson", "Orin", "Thor", "Xavier", "Tegra")


@dataclass(frozen=True, slots=True)
class Word:
    """The bytes that a remedy can give on one rank.

    Attributes:
        size: So many bytes; ``None`` where there is no figure for it at all.
        is_certain: Whether the worker says so; else it is no more than a bound.
    """

    size: int | None
    is_certain: bool = True


def word(remedy: str, signal: str, reading: RankReading) -> Word:
    """Return what the remedy can give on this rank of what the signal counts."""
    encoder = reading.components.encoder_cache_bytes
    if signal in HOST_SIGNALS:
        return Word(None)
    if remedy == "release" and reading.device.type == "cpu":
        return Word(None)  # free heap, of which nobody knows how much there is
    if remedy == "release" and signal != "encoder_cache_bytes":
        return Word(reserve_bytes(reading) or 0, reading.releasable_bytes is not None)
    if remedy == "trim_encoder_cache":
        known = reading.trimmable_bytes
        return Word(known if known is not None else encoder or 0, known is not None)
    if remedy == "reset_encoder_cache":
        return Word(encoder or 0)
    return Word(None)


def freed(
    remedy: str, signal: str, result: RemedyResult, before: Sequence[RankReading], after: Sequence[RankReading]
) -> tuple[tuple[RankFreed, ...], int | None]:
    """Return what the remedy freed of the signal, by rank and in all. Ranks of one host share its memory."""
    if signal not in HOST_SIGNALS:
        credited = credit(remedy, before, after, result.detail)
        return credited.ranks, credited.freed_bytes or 0
    earlier = {rank_key(reading): host_share(reading)[0] for reading in before}
    ranks = tuple(
        RankFreed(
            rank=now.rank, dp_rank=now.dp_rank, freed_bytes=_difference(earlier[rank_key(now)], host_share(now)[0])
        )
        for now in after
        if rank_key(now) in earlier
    )
    return ranks, _difference(host_used(before), host_used(after)) or 0


def is_integrated(reading: RankReading) -> bool:
    """Return whether the device's memory is the machine's own."""
    return any(name in (reading.device.name or "") for name in _INTEGRATED)


def _difference(was: int | None, now: int | None) -> int | None:
    return max(was - now, 0) if was is not None and now is not None else None
