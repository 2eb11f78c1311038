"""PyTorch's allocator: what it could not get, and what it keeps that no tensor uses. Pure."""

from __future__ import annotations

from highwater.diagnose.advice import COMPONENT_MEANING, against_fragmentation
from highwater.diagnose.case import Case, RankCase, highest
from highwater.diagnose.finding import Finding, finding, times
from highwater.diagnose.rules.device import filled_up, is_device_full
from highwater.units import MIB

# Of total, and in bytes: an allocator keeps less than both in its ordinary course.
UNUSED_RATIO, UNUSED_BYTES = 0.03, 1024 * MIB


def ooms(case: Case) -> Finding | None:
    rise, rank = highest(case.ranks, lambda each: each.ooms) or (0, None)
    return finding("ooms", rank=rank, rise=rise) if rank is not None and rise else None


def alloc_retries(case: Case) -> Finding | None:
    rise, rank = highest(case.ranks, lambda each: each.alloc_retries) or (0, None)
    if rank is None or not rise:
        return None
    return finding(
        "alloc_retries",
        weight="likely" if case.is_load else "clue",
        advice=("policy_earlier", *against_fragmentation(rank.device_type), "gpu_memory_utilization"),
        rank=rank,
        rise=rise,
        often=times(rise),
    )


def unused_reserve(case: Case) -> Finding | None:
    """Report that PyTorch's allocator held much that no tensor used: cached, or in fragments.

    What captured graphs hold between their runs is no tensor's either, and is needed. Where it is known what a release
    would have given back, it is left out.
    """
    unused, rank = highest(case.ranks, _unused_bytes) or (0, None)
    if rank is None or not _is_much(unused, rank):
        return None
    releasable = rank.now.releasable_bytes
    would_help = releasable is None or _is_much(releasable, rank)
    is_full = is_device_full(rank)
    is_reason = is_full and would_help and not case.is_load and filled_up(case, rank)
    return finding(
        "unused_reserve",
        weight="likely" if is_reason else "clue",
        advice=(
            *(("release",) if would_help else ()),
            *against_fragmentation(rank.device_type),
            *(() if case.is_load else ("policy_earlier",)),
        ),
        rank=rank,
        unused=unused,
        is_full=is_full,
        is_load=case.is_load,
        meaning=COMPONENT_MEANING["torch_cached_bytes"],
    )


def _unused_bytes(rank: RankCase) -> int | None:
    if rank.now.releasable_bytes is None:
        return rank.unused_bytes
    return rank.now.releasable_bytes + (rank.now.torch.inactive_split_bytes or 0)


def _is_much(unused: int, rank: RankCase) -> bool:
    return unused > max(UNUSED_BYTES, int(UNUSED_RATIO * (rank.now.total_bytes or 0)))
