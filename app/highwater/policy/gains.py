"""The bytes that a remedy can give, by the workers' own figures, and those that it gave. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from highwater.accounting.remedies import TRAITS, PossibleGain, credit
from highwater.accounting.totals import host_used
from highwater.policy.rules import HOST_SIGNALS
from highwater.readings.policy import RankFreed
from highwater.readings.rank import RankReading
from highwater.readings.remedy import RemedyResult

# Product names of GPUs that share the machine's memory: moving encoder outputs to the host frees nothing there.
_INTEGRATED = ("GB10", "Jetson", "Orin", "Thor", "Xavier", "Tegra")


def possible_gain(remedy: str, signal: str, reading: RankReading) -> PossibleGain:
    traits = TRAITS[remedy]
    return traits.can_give(reading) if signal in traits.lowers else PossibleGain(None)


def freed(
    remedy: str, signal: str, result: RemedyResult, before: Sequence[RankReading], after: Sequence[RankReading]
) -> tuple[tuple[RankFreed, ...], int | None]:
    """Return what the remedy freed of the signal, by rank and in all. Ranks of one host share its memory."""
    if signal not in HOST_SIGNALS:
        credited = credit(remedy, before, after, result.detail)
        return credited.ranks, credited.freed_bytes or 0
    earlier = {reading.key: reading.host_memory.share[0] for reading in before}
    ranks = tuple(
        RankFreed(
            rank=now.rank, dp_rank=now.dp_rank, freed_bytes=_difference(earlier[now.key], now.host_memory.share[0])
        )
        for now in after
        if now.key in earlier
    )
    return ranks, _difference(host_used(before), host_used(after)) or 0


def is_integrated(reading: RankReading) -> bool:
    return any(name in (reading.device.name or "") for name in _INTEGRATED)


def _difference(before: int | None, after: int | None) -> int | None:
    return max(before - after, 0) if before is not None and after is not None else None
