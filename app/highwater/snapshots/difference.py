"""What grew between two snapshots of one process, by the stack that allocated it. Pure.

It means most between two moments at which no request runs: what a request holds for its own time is in neither then.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final, TypeAlias, TypeVar

from highwater.snapshots.explanation import Sums, frames_of, sums_of
from highwater.snapshots.model import Snapshot, Stack

_SHOWN: Final = 20
_Figures: TypeAlias = tuple[int, int]
"""Bytes in use, and in how many blocks."""
_Key = TypeVar("_Key", Stack, int)


def differ(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Return what is different in the second, as JSON."""
    devices = sorted({segment.device for one in (before, after) for segment in one.segments})
    return {
        "has_stacks": [before.has_stacks, after.has_stacks],
        "devices": [_device(device, before, after) for device in devices],
    }


def _device(device: int, before: Snapshot, after: Snapshot) -> dict[str, Any]:
    sums = [_sums(device, one) for one in (before, after)]
    stacks = [_by_stack(device, one) for one in (before, after)]
    sizes = [_by_size(device, one) for one in (before, after)]
    grown = _grown(stacks[0], stacks[1])
    by_size = _grown(sizes[0], sizes[1])
    return {
        "device": device,
        "in": [bool(one.segments) for one in sums],
        "before": sums[0].as_json(),
        "after": sums[1].as_json(),
        "by_stack": [
            {"stack": frames_of(stack), "bytes": size, "blocks": count} for stack, size, count in grown[:_SHOWN]
        ],
        "by_stack_left_out": _left_out(grown),
        "by_size": [{"block_bytes": key, "bytes": size, "blocks": count} for key, size, count in by_size[:_SHOWN]],
        "by_size_left_out": _left_out(by_size),
    }


def _left_out(grown: list[Any]) -> dict[str, int]:
    rest = grown[_SHOWN:]
    return {"count": len(rest), "bytes": sum(size for _, size, _ in rest)}


def _sums(device: int, snapshot: Snapshot) -> Sums:
    return sums_of(segment for segment in snapshot.segments if segment.device == device)


def _by_stack(device: int, snapshot: Snapshot) -> dict[Stack, _Figures]:
    found: defaultdict[Stack, list[int]] = defaultdict(lambda: [0, 0])
    for segment in snapshot.segments:
        for block in segment.blocks if segment.device == device else ():
            if block.state != "free":
                found[block.stack][0] += block.size
                found[block.stack][1] += 1
    return {stack: (size, count) for stack, (size, count) in found.items()}


def _by_size(device: int, snapshot: Snapshot) -> dict[int, _Figures]:
    found: defaultdict[int, int] = defaultdict(int)
    for segment in snapshot.segments:
        for block in segment.blocks if segment.device == device else ():
            if block.state != "free":
                found[block.size] += 1
    return {size: (size * count, count) for size, count in found.items()}


def _grown(before: dict[_Key, _Figures], after: dict[_Key, _Figures]) -> list[tuple[_Key, int, int]]:
    """Return what differs in bytes, with the largest growth first and the largest shrinkage last."""
    grown = []
    for key in {**before, **after}:
        (old_size, old_count), (size, count) = before.get(key, (0, 0)), after.get(key, (0, 0))
        if size != old_size:
            grown.append((key, size - old_size, count - old_count))
    return sorted(grown, key=lambda one: (-one[1], str(one[0])))
