"""The bytes that torch's caching allocator counts as allocated for tensors of given sizes.

vLLM's "Model loading took N GiB" is the growth of `allocated_bytes`, which counts blocks and not tensors: a block is
split only where more than 1 MiB would remain of it (`should_split` in c10/cuda/CUDACachingAllocator.cpp). Qwen2.5-7B's
tensors take 14.19 GiB, its blocks 14.25 GiB, and 14.25 is what vLLM logs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from highwater.units import MIB, round_up

_MIN_BLOCK = 512
_SMALL_SIZE = MIB
_LARGE_SEGMENT = 20 * MIB
_MIN_SEGMENT_OF_ITS_OWN = 10 * MIB
_ROUND_SEGMENT = 2 * MIB


def allocated_at_least(sizes: Iterable[int]) -> int:
    """Return the least that the allocator counts for these tensors, allocated in any order.

    Tensors of 1 to 10 MiB share blocks, and what remains of those depends on the order.
    """
    return sum(
        allocated_bytes([size], expandable_segments=size < _MIN_SEGMENT_OF_ITS_OWN - _MIN_BLOCK) for size in sizes
    )


def allocated_bytes(sizes: Iterable[int], *, expandable_segments: bool = False) -> int:
    """Return the bytes that the allocator counts after these tensors were allocated, in this order, and none freed.

    With ``expandable_segments`` it splits every block (the default on Ascend from vllm-ascend 0.14).
    """
    allocated = 0
    remainders: list[int] = []  # Of large blocks, sorted: the smallest that is large enough is taken.
    for size in sizes:
        needed = round_up(size, _MIN_BLOCK)
        if needed <= _SMALL_SIZE or expandable_segments:
            allocated += needed
            continue
        place = bisect_left(remainders, needed)
        block = (
            remainders.pop(place)
            if place < len(remainders)
            else (_LARGE_SEGMENT if needed < _MIN_SEGMENT_OF_ITS_OWN else round_up(needed, _ROUND_SEGMENT))
        )
        if block - needed > _SMALL_SIZE:
            insort(remainders, block - needed)
            block = needed
        allocated += block
    return allocated
