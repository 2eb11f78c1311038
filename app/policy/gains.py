"""What a remedy can give, by the workers' own word, and what it gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from app.attribution import host_share, host_used, rank_key
from app.policy.rules import HOST_SIGNALS
from app.policy.waters import reserve_bytes
from app.readings import RankFreed, RankReading, RemedyResult

# Product names of GPUs that share the machine's memory: moving encoder outputs to the host frees nothing there.
_INTEGRATED = ("GB10", "Jetson", "Orin", "Thor", "Xavier", "Tegra")

RankKey: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Word:
    """What a remedy can give on one rank.

    Attributes:
        size: So many bytes; ``None`` where there is no figure for it at all.
        is_certain: Whether the worker says so; else it is no more than a bound.
    """

    size: int | None
    is_certain: bool = True


def word(remedy: str, signal: str, reading: RankReading) -> Word:
    """What the remedy can give on this rank of what the signal counts."""
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


def freed(remedy: str, signal: str, before: Sequence[RankReading], after: Sequence[RankReading]) -> list[RankFreed]:
    """What the remedy freed on each rank that was read before and after it, of what it can free; never negative.

    Judged by the remedy's own component: a trim that finds nothing earns nothing by the release after it, and a
    reset that frees no device memory earns nothing by chance.
    """
    earlier = {rank_key(reading): reading for reading in before}
    return [
        RankFreed(rank=now.rank, dp_rank=now.dp_rank, freed_bytes=_less(remedy, signal, earlier[rank_key(now)], now))
        for now in after
        if rank_key(now) in earlier
    ]


def credit(remedy: str, signal: str, result: RemedyResult, ranks: list[RankFreed]) -> list[RankFreed]:
    """The same, with the worker's own word where a release has it: measured in the call, before the engine went on."""
    if remedy != "release" or signal in HOST_SIGNALS:
        return ranks
    told = {
        (answer.get("dp_rank") or 0, answer.get("rank") or 0): size
        for answer in result.detail
        if isinstance(size := answer.get("freed_bytes"), int)
    }
    return [
        RankFreed(rank=one.rank, dp_rank=one.dp_rank, freed_bytes=max(told[key], 0)) if key in told else one
        for one in ranks
        for key in [(one.dp_rank or 0, one.rank or 0)]
    ]


def total(signal: str, ranks: Iterable[RankFreed], before: Sequence[RankReading], after: Sequence[RankReading]) -> int:
    """Over all ranks; the ranks of one host share its memory, which then counts once."""
    if signal in HOST_SIGNALS:
        was, now = host_used(before), host_used(after)
        return max(was - now, 0) if was is not None and now is not None else 0
    return sum(one.freed_bytes or 0 for one in ranks)


def is_integrated(reading: RankReading) -> bool:
    """Whether the device's memory is the machine's own."""
    return any(name in (reading.device.name or "") for name in _INTEGRATED)


def _less(remedy: str, signal: str, was: RankReading, now: RankReading) -> int | None:
    if signal in HOST_SIGNALS:
        return _difference(host_share(was)[0], host_share(now)[0])
    if remedy == "release":
        # On NPU empty_cache drops the operators' workspaces too, which PyTorch's allocator does not count.
        cached = _difference(was.components.torch_cached_bytes, now.components.torch_cached_bytes)
        other = _difference(was.components.non_torch_bytes, now.components.non_torch_bytes)
        if was.device.type == "cpu":
            return other
        return cached if was.device.type != "npu" or cached is None else cached + (other or 0)
    if remedy in {"trim_encoder_cache", "reset_encoder_cache"}:
        return _difference(was.components.encoder_cache_bytes, now.components.encoder_cache_bytes)
    return 0


def _difference(was: int | None, now: int | None) -> int | None:
    return max(was - now, 0) if was is not None and now is not None else None
