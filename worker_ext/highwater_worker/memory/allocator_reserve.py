"""The part of the allocator reserve that `release` can give back.

The whole reserve, reserved less allocated, is more. Of a segment that still holds a tensor nothing can go: its free
pieces are what torch counts as `inactive_split_bytes`. And of free memory that it does not count there, `empty_cache`
keeps some all the same: whole free segments in the private pools of captured graphs, and the ends of free ranges in
expandable segments, which are given back by the page. That part is *kept*; it hardly changes once the graphs are
captured, and is learned in two ways: by one look at the allocator's segments, and from what is left after each
`empty_cache` of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from highwater_worker.devices.accelerator import on_main_thread
from highwater_worker.errors import UnreadableError, describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from highwater_worker.devices import Device
    from highwater_worker.devices.figures import AllocatorFigures

MAX_BLOCKS = 10_000
"""Up to so many a walk is cheap: torch makes a small dict of each block, in a few microseconds."""
_NO_POOL = (0, 0)
_PAGES = {"small": 2 << 20, "large": 20 << 20}
"""Bytes of a page in an expandable segment (torch 2.13.0 include/c10/core/AllocatorConfig.h:17 `kSmallBuffer`, and
torch 2.13.0 include/c10/core/AllocatorConfig.h:340 `large_segment_size_`; torch_npu has the same). Where a user has
chosen another large one, the first release corrects the figure."""


@dataclass
class AllocatorReserve:
    """The knowledge of one worker's allocator."""

    kept_bytes: int | None = None
    """Free bytes that `empty_cache` would keep and that torch does not count as `inactive_split_bytes`."""
    unknown_because: str | None = None
    """The reason why the segments could not be read; None before that was tried."""

    def releasable_bytes(self, figures: AllocatorFigures) -> int | None:
        """Return the bytes that `empty_cache` would give back now, None where the part that it keeps is unknown."""
        unused = _unsplit_bytes(figures)
        return None if unused is None or self.kept_bytes is None else max(0, unused - self.kept_bytes)

    def learn_after_release(self, figures: AllocatorFigures) -> None:
        """Learn the part that `empty_cache` keeps from the bytes left unused right after it."""
        unused = _unsplit_bytes(figures)
        if unused is not None:
            self.kept_bytes = max(0, unused)

    def look_once(self, device: Device | None) -> None:
        """Learn from the allocator's segments, unless something is known already.

        It walks all of them, while the engine waits: once in a worker's life, on the main thread alone, and only where
        they are few.
        """
        if device is None or device.type == "cpu" or not on_main_thread():
            return
        if self.kept_bytes is not None or self.unknown_because is not None:
            return
        try:
            self.kept_bytes = _look(device)
        except Exception as error:  # noqa: BLE001 - one figure stays unknown until the first release; `memory` says why
            self.unknown_because = describe(error)


def _unsplit_bytes(figures: AllocatorFigures) -> int | None:
    if figures.reserved_bytes is None or figures.allocated_bytes is None:
        return None
    return figures.reserved_bytes - figures.allocated_bytes - (figures.inactive_split_bytes or 0)


def _look(device: Device) -> int:
    blocks = device.family.block_count(device.index)
    if blocks is None or blocks > MAX_BLOCKS:
        count = "an unknown number of" if blocks is None else blocks
        raise UnreadableError(f"the allocator has {count} blocks, too many to walk; the first release will show it")
    return kept_bytes(device.family.segments(device.index), device.index)


def kept_bytes(segments: Iterable[Mapping[str, Any]], index: int | None) -> int:
    """Return the free bytes that `empty_cache` would keep and that are not in torch's `inactive_split_bytes`.

    Args:
        segments: As `torch.<type>.memory_snapshot` returns them, of every device that the process uses.
        index: The worker's device.

    Raises:
        UnreadableError: The segments do not name their pool.
    """
    return sum(_kept_of(segment) for segment in segments if segment.get("device", index) == index)


def _kept_of(segment: Mapping[str, Any]) -> int:
    pool = segment.get("segment_pool_id")
    if pool is None:
        raise UnreadableError("torch does not show the pool of a segment; the first release will show what is kept")
    free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
    is_private, is_expandable = tuple(pool) != _NO_POOL, bool(segment.get("is_expandable"))
    if is_expandable:
        return sum(free) if is_private else _ends_of_pages(segment)
    # A segment of several blocks is split, and its free ones are counted by torch.
    return sum(free) if is_private and len(segment["blocks"]) == 1 else 0


def _ends_of_pages(segment: Mapping[str, Any]) -> int:
    # A mapping begins and ends with a page; of a free block only whole pages are unmapped.
    page = _PAGES.get(str(segment.get("segment_type")), _PAGES["large"])
    kept, start = 0, 0
    for block in segment["blocks"]:
        end = start + block["size"]
        if block["state"] == "inactive":
            pages = max(0, end // page - -(-start // page))
            kept += block["size"] - pages * page
        start = end
    return kept
