"""A model of torch's caching allocator: segments, their blocks, private pools, and what `empty_cache` does to them.

After c10/cuda/CUDACachingAllocator.cpp (torch 2.13) and NPUCachingAllocator.cpp (torch_npu 2.8), which agree in this:
`inactive_split_bytes` are the free blocks beside others in segments that cannot expand; `empty_cache` gives back free
segments that are not split, whole free pages of expandable segments, and nothing of a pool that a graph still needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEFAULT_POOL = (0, 0)
MIB = 1 << 20
PAGES = {"small": 2 * MIB, "large": 20 * MIB}


@dataclass
class Block:
    size: int
    is_used: bool


@dataclass
class Segment:
    """A list of blocks, no two free ones beside each other."""

    blocks: list[Block]
    pool: tuple[int, int] = DEFAULT_POOL
    is_expandable: bool = False
    kind: str = "large"
    device: int = 1

    @property
    def free_bytes(self) -> int:
        return sum(block.size for block in self.blocks if not block.is_used)

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def free(self, index: int) -> None:
        """Free one block, and join it with free ones beside it."""
        self.blocks[index].is_used = False
        joined: list[Block] = []
        for block in self.blocks:
            if joined and not block.is_used and not joined[-1].is_used:
                joined[-1].size += block.size
            else:
                joined.append(block)
        self.blocks = joined

    def take(self, index: int, size: int) -> None:
        """Put a tensor at the start of a free block."""
        block = self.blocks[index]
        block.is_used = True
        if block.size > size:
            self.blocks.insert(index + 1, Block(block.size - size, is_used=False))
            block.size = size


@dataclass
class FakeAllocator:
    """What `torch.<type>` asks: put its methods in place of a fake device module's."""

    segments: list[Segment] = field(default_factory=list)

    def _own(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.device == 1]

    def memory_stats(self, _index: object = None) -> dict[str, object]:
        own = self._own()
        split = [segment for segment in own if len(segment.blocks) > 1 and not segment.is_expandable]
        reserved = sum(segment.size for segment in own)
        return {
            "reserved_bytes.all.current": reserved,
            "allocated_bytes.all.current": reserved - sum(segment.free_bytes for segment in own),
            "allocated_bytes.all.peak": reserved,
            "inactive_split_bytes.all.current": sum(segment.free_bytes for segment in split),
            "active.all.current": sum(block.is_used for segment in own for block in segment.blocks),
            "inactive_split.all.current": sum(not block.is_used for one in split for block in one.blocks),
            "segment.all.current": len(own),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def memory_snapshot(self, _mempool_id: object = None, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces, "the history of allocations can be gigabytes"
        return [
            {
                "device": segment.device,
                "total_size": segment.size,
                "segment_type": segment.kind,
                "segment_pool_id": segment.pool,
                "is_expandable": segment.is_expandable,
                "blocks": [
                    {"size": block.size, "state": "active_allocated" if block.is_used else "inactive"}
                    for block in segment.blocks
                ],
            }
            for segment in self.segments
        ]

    def empty_cache(self) -> int:
        """Return the bytes that the device gets."""
        before = sum(segment.size for segment in self.segments)
        kept: list[Segment] = []
        for segment in self.segments:
            if segment.pool != DEFAULT_POOL:
                kept.append(segment)
            elif segment.is_expandable:
                kept += unmapped(segment)
            elif any(block.is_used for block in segment.blocks):
                kept.append(segment)
        self.segments = kept
        return before - sum(segment.size for segment in kept)


def unmapped(segment: Segment) -> list[Segment]:
    """Return what is left of an expandable segment: one for each stretch that is still mapped."""
    page = PAGES[segment.kind]
    stretches: list[list[Block]] = [[]]
    start = 0
    for block in segment.blocks:
        end = start + block.size
        first, last = -(-start // page) * page, end // page * page
        if block.is_used or first >= last:
            stretches[-1].append(block)
        else:
            stretches[-1] += [Block(first - start, is_used=False)] if first > start else []
            stretches.append([Block(end - last, is_used=False)] if end > last else [])
        start = end
    return [Segment(blocks, segment.pool, True, segment.kind, segment.device) for blocks in stretches if blocks]
