"""The growth between two snapshots of one process, by the stack that allocated it. Pure.

It is most useful between two moments at which no request runs, because neither has a running request's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from highwater.snapshots.explanation import frames_of, sums_of
from highwater.snapshots.model import Snapshot

_SHOWN: Final = 20


def differ(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Return the changes from the first to the second, as JSON."""
    devices = sorted({segment.device for one in (before, after) for segment in one.segments})
    return {
        "has_stacks": [before.has_stacks, after.has_stacks],
        "devices": [_device(device, before, after) for device in devices],
    }


def _device(device: int, *snapshots: Snapshot) -> dict[str, Any]:
    before, after = (sums_of(segment for segment in one.segments if segment.device == device) for one in snapshots)
    stacks = _changes(*(_held(device, one, "stack") for one in snapshots))
    sizes = _changes(*(_held(device, one, "size") for one in snapshots))
    return {
        "device": device,
        "in": [bool(before.segments), bool(after.segments)],
        "before": before.as_json(),
        "after": after.as_json(),
        "by_stack": [
            {"stack": frames_of(stack), "bytes": size, "blocks": count} for stack, size, count in stacks[:_SHOWN]
        ],
        "by_stack_left_out": _left_out(stacks),
        "by_size": [{"block_bytes": key, "bytes": size, "blocks": count} for key, size, count in sizes[:_SHOWN]],
        "by_size_left_out": _left_out(sizes),
    }


def _left_out(changes: list[tuple[Any, int, int]]) -> dict[str, int]:
    rest = changes[_SHOWN:]
    return {"count": len(rest), "bytes": sum(size for _, size, _ in rest)}


def _held(device: int, snapshot: Snapshot, key: str) -> Mapping[Any, list[int]]:
    """Return the bytes in use and the number of their blocks, by a block's stack or size."""
    figures: defaultdict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for segment in snapshot.segments:
        for block in segment.held if segment.device == device else ():
            of_key = figures[getattr(block, key)]
            of_key[0] += block.size
            of_key[1] += 1
    return figures


def _changes(before: Mapping[Any, list[int]], after: Mapping[Any, list[int]]) -> list[tuple[Any, int, int]]:
    """Return the changes in bytes and blocks, with the largest growth first and the largest shrinkage last."""
    changes = []
    for key in {**before, **after}:
        (old_size, old_count), (size, count) = before.get(key, (0, 0)), after.get(key, (0, 0))
        if size != old_size:
            changes.append((key, size - old_size, count - old_count))
    return sorted(changes, key=lambda one: (-one[1], str(one[0])))
