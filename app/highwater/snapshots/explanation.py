"""A snapshot in figures: pools, holes, what pins segments, and what could be given back. Pure.

Which memory a request can use follows PyTorch's allocator: blocks of its own pool, kind and stream only. A request of
up to 1 MiB goes to the small kind, whose segments have 2 MiB; any other to the large kind, whose segments have 20 MiB
for requests below 10 MiB, and the request's own size, in steps of 2 MiB, above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from highwater.snapshots.model import DEFAULT_POOL, Segment, Snapshot, Stack
from highwater.units import MIB, ceil_div, round_up

SMALL_REQUEST: Final = 1 * MIB
PAGES: Final = {"small": 2 * MIB, "large": 20 * MIB}
"""Bytes of a page of an expandable segment."""
_LARGE_STEP: Final = 2 * MIB
_OWN_SEGMENT: Final = 10 * MIB
_SHOWN_PINS: Final = 20
_SHOWN_POOLS: Final = 200
_SHOWN_FRAMES: Final = 6


@dataclass(slots=True)
class Sums:
    """Bytes of some segments; `reserved` is the sum of `allocated`, `pending` and `free`."""

    segments: int = 0
    reserved: int = 0
    allocated: int = 0
    pending: int = 0  # in blocks that were freed and wait for another stream
    free: int = 0
    rounding: int = 0  # the part of `allocated` that was not requested
    largest_free: int = 0
    holed_segments: int = 0  # segments in use that have free bytes
    held_free: int = 0  # those bytes
    whole_segments: int = 0  # segments that are all free
    whole_free: int = 0  # their bytes

    def add(self, segment: Segment) -> None:
        """Count one more segment."""
        free = segment.free_bytes
        self.segments += 1
        self.reserved += segment.size
        self.free += free
        for block in segment.blocks:
            if block.state == "live":
                self.allocated += block.size
                self.rounding += block.size - block.requested
            elif block.state == "pending":
                self.pending += block.size
            else:
                self.largest_free = max(self.largest_free, block.size)
        if free == segment.size:
            self.whole_segments += 1
            self.whole_free += free
        elif free:
            self.holed_segments += 1
            self.held_free += free

    def as_json(self) -> dict[str, int]:
        """Return them by name; sizes end in ``_bytes``."""
        counts = {"segments", "holed_segments", "whole_segments"}
        return {name if name in counts else f"{name}_bytes": getattr(self, name) for name in Sums.__slots__}


_PoolKey: TypeAlias = tuple[tuple[int, int], str, int]
"""Pool, kind and stream: a request uses free blocks of one of these alone."""


def explain(snapshot: Snapshot, want: int | None = None) -> dict[str, Any]:
    """Return the explanation, as JSON; judged by a request of ``want`` bytes, or else the largest of the history."""
    by_device: defaultdict[int, list[Segment]] = defaultdict(list)
    for segment in snapshot.segments:
        by_device[segment.device].append(segment)
    return {
        "has_stacks": snapshot.has_stacks,
        "trace_entries": snapshot.trace_entries,
        "settings": dict(snapshot.settings),
        "devices": [_device(device, segments, snapshot, want) for device, segments in sorted(by_device.items())],
    }


def _device(device: int, segments: list[Segment], snapshot: Snapshot, want: int | None) -> dict[str, Any]:
    pools: defaultdict[_PoolKey, Sums] = defaultdict(Sums)
    for segment in segments:
        pools[segment.pool, segment.kind, segment.stream].add(segment)
    shown = sorted(pools.items(), key=lambda one: -one[1].reserved)
    private = [segment for segment in segments if segment.is_private]
    return {
        "device": device,
        **sums_of(segments).as_json(),
        "private_bytes": sum(segment.size for segment in private),
        "pools": [
            {"pool": list(pool), "kind": kind, "stream": stream, **sums.as_json()}
            for (pool, kind, stream), sums in shown[:_SHOWN_POOLS]
        ],
        "pools_left_out": max(0, len(shown) - _SHOWN_POOLS),
        "wanted": _wanted(device, pools, snapshot, want),
        "release_bytes": sum(map(_released, segments)),
        "release_segments": sum(_released(segment) == segment.size for segment in segments),
        "kept_whole_bytes": sum(map(_whole_free, private)),
        "expandable": _expandable(segments),
        **_pins(segments),
    }


def sums_of(segments: Iterable[Segment]) -> Sums:
    """Return the sums over segments."""
    sums = Sums()
    for segment in segments:
        sums.add(segment)
    return sums


# --- a request against what is free ---


def _wanted(device: int, pools: Mapping[_PoolKey, Sums], snapshot: Snapshot, want: int | None) -> dict[str, Any] | None:
    seen = snapshot.largest.get(device)
    if want is not None:
        size, origin, free = want, "asked", None
    elif seen is not None:
        size, origin, free = seen.size, "failed" if seen.failed else "history", seen.device_free
    else:
        return None
    kind = kind_for(size)
    # A wanted size is judged on the stream that has most memory: the one that the engine computes on.
    streams = {key[2]: sums.reserved for key, sums in pools.items() if key[:2] == (DEFAULT_POOL, kind)}
    busiest = max(streams, key=lambda one: (streams[one], -one), default=0)
    stream = seen.stream if seen is not None and want is None else busiest
    largest = pools.get((DEFAULT_POOL, kind, stream), Sums()).largest_free
    return {
        "bytes": size,
        "from": origin,
        "kind": kind,
        "stream": stream,
        "largest_free_bytes": largest,
        "fits": largest >= rounded(size),
        "new_segment_bytes": new_segment(size),
        "device_free_bytes": free,
    }


def rounded(size: int) -> int:
    """Return the bytes of the block that a request takes: a multiple of 512."""
    return max(512, round_up(size, 512))


def kind_for(size: int) -> str:
    """Return the kind of segment that serves a request."""
    return "small" if rounded(size) <= SMALL_REQUEST else "large"


def new_segment(size: int) -> int:
    """Return the bytes that PyTorch requests from the driver where no free block serves a request."""
    size = rounded(size)
    if size <= SMALL_REQUEST:
        return PAGES["small"]
    return PAGES["large"] if size < _OWN_SEGMENT else round_up(size, _LARGE_STEP)


# --- what could be given back ---


def _whole_free(segment: Segment) -> int:
    return segment.size if segment.free_bytes == segment.size else 0


def _released(segment: Segment) -> int:
    """Return the bytes of a segment that `empty_cache` gives back: all or nothing, or whole pages where expandable.

    The private pools of captured graphs and of sleep mode keep theirs as long as their owner lives.
    """
    if segment.is_private:
        return 0
    return _pages_free(segment) if segment.is_expandable else _whole_free(segment)


def _pages_free(segment: Segment) -> int:
    """Return the bytes of whole pages within a segment's free blocks."""
    page = PAGES[segment.kind]
    start = pages = 0
    for block in segment.blocks:
        end = start + block.size
        if block.state == "free":
            pages += max(0, end // page - ceil_div(start, page))
        start = end
    return pages * page


def _expandable(segments: list[Segment]) -> dict[str, int]:
    """Return what `release` would give back besides if each partly used segment were expandable, by this layout."""
    mapped = [segment for segment in segments if segment.is_expandable]
    holed = [one for one in segments if not one.is_expandable and not one.is_private and not _whole_free(one)]
    return {
        "segments": len(mapped),
        "bytes": sum(segment.size for segment in mapped),
        "pages_bytes": sum(map(_pages_free, holed)),
        "at_most_bytes": sum(segment.free_bytes for segment in holed),
    }


# --- what pins segments ---


def _pins(segments: list[Segment]) -> dict[str, Any]:
    """Return the partly used segments with most free bytes, and for each stack how much free memory it pins."""
    holed = [(free, segment) for segment in segments if 0 < (free := segment.free_bytes) < segment.size]
    holed.sort(key=lambda one: (-one[0], one[1].address))
    by_stack: defaultdict[Stack, list[int]] = defaultdict(lambda: [0, 0, 0])
    for free, segment in holed:
        held: defaultdict[Stack, int] = defaultdict(int)
        for block in segment.held:
            held[block.stack] += block.size
        for stack, size in held.items():
            by_stack[stack] = [old + new for old, new in zip(by_stack[stack], (1, size, free), strict=True)]
    # A segment that several stacks hold is pinned by each: all must go before it is free.
    ranked = sorted(by_stack.items(), key=lambda one: (-one[1][2], one[1][1]))
    return {
        "pins": [_pin(free, segment) for free, segment in holed[:_SHOWN_PINS]],
        "pins_left_out": max(0, len(holed) - _SHOWN_PINS),
        "pinned_by": [
            {"stack": frames_of(stack), "segments": count, "held_bytes": size, "free_bytes": free}
            for stack, (count, size, free) in ranked[:_SHOWN_PINS]
            if stack
        ],
    }


def _pin(free: int, segment: Segment) -> dict[str, Any]:
    held = list(segment.held)
    largest = max(held, key=lambda block: block.size)
    return {
        "address": segment.address,
        "bytes": segment.size,
        "free_bytes": free,
        "largest_free_bytes": max(block.size for block in segment.blocks if block.state == "free"),
        "held_blocks": len(held),
        "held_bytes": segment.size - free,
        "largest_held_bytes": largest.size,
        "stack": frames_of(largest.stack),
        "kind": segment.kind,
        "pool": list(segment.pool),
        "stream": segment.stream,
    }


def frames_of(stack: Stack) -> list[str]:
    """Return a stack's innermost frames outside PyTorch, each ``file:line function``; PyTorch's own where all are."""
    own = [frame for frame in stack if not _is_torchs(frame[0])] or list(stack)
    # The last parts of a path identify the package.
    return [f"{'/'.join(file.split('/')[-3:])}:{line} {name}" for file, line, name in own[:_SHOWN_FRAMES]]


def _is_torchs(file: str) -> bool:
    return file in ("??", "") or "/torch/" in file or "/torch_npu/" in file or not file.endswith(".py")
