"""PyTorch's allocator: the part of its reserve that `release` can give back, and the history of its allocations.

The whole reserve, reserved less allocated, is more. Of a segment that still holds a tensor nothing can go: its free
pieces are what torch counts as `inactive_split_bytes`. And of free memory that it does not count there, `empty_cache`
keeps some all the same: whole free segments in the private pools of captured graphs, and the ends of free ranges in
expandable segments, which are given back by the page. That part is *kept*. It is learned in two ways: by a look at the
allocator's segments, and from what is left after each `empty_cache` by this package. Graphs' pools hardly change once
the graphs are captured, so one look is enough; the ends of free ranges change with every allocation, so where segments
are expandable the look is repeated. On an H200 they grew from nothing to 1.3 of 4.5 GiB of reserve within a second.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from highwater_worker.devices import AllocatorFigures, Device, Space, on_main_thread
from highwater_worker.errors import RefusedError, UnavailableError, UnreadableError, describe
from highwater_worker.wrapping import unwrap_method, wrap_method

MAX_BLOCKS = 10_000
"""Up to so many a walk is cheap: torch makes a small dict of each block, in a few microseconds."""
SURE_BYTES = 2 << 20  # a look and a release may differ by so much: other threads may allocate between both
LOOK_AGAIN_SECONDS = 10.0
LOOK_SHARE = 1000
"""After a look there is none for so many times its duration: at most a 1000th of the engine's thread."""
_NO_POOL = (0, 0)
_PAGES = {"small": 2 << 20, "large": 20 << 20}
"""Bytes of a page in an expandable segment (torch 2.13.0 include/c10/core/AllocatorConfig.h:17 `kSmallBuffer`, and
torch 2.13.0 include/c10/core/AllocatorConfig.h:340 `large_segment_size_`; torch_npu has the same). Where a user has
chosen another large one, the first release corrects the figure."""


@dataclass
class AllocatorReserve:
    kept_bytes: int | None = None
    """Free bytes that `empty_cache` would keep and that torch does not count as `inactive_split_bytes`."""
    unknown_because: str | None = None
    """The reason why the segments could not be read; None before that was tried, and where they could."""
    clock: Callable[[], float] = time.monotonic  # seconds, for the pause between two looks
    _look_from: float = float("-inf")
    _is_expandable: bool = False

    def releasable_bytes(self, figures: AllocatorFigures, space: Space) -> int | None:
        """Return the bytes that `empty_cache` would give back now, None where the part that it keeps is unknown.

        None also of a device that cannot be read: torch keeps counting for a lost one, and nothing goes back to it.
        """
        unused = None if space.free_bytes is None else _unsplit_bytes(figures)
        return None if unused is None or self.kept_bytes is None else max(0, unused - self.kept_bytes)

    def learn_after_release(self, device: Device, figures: AllocatorFigures) -> None:
        """Learn the part that `empty_cache` keeps from the bytes left unused right after it.

        A look at this moment must see the same. Where it does not, with pages of another size for example, there are no
        more looks, and the figure is as of the last release.
        """
        unused = _unsplit_bytes(figures)
        if unused is None:
            return
        if self._is_expandable and on_main_thread():  # as for every look: on the main thread alone
            seen = float("inf")
            with suppress(Exception):  # whatever the reason: nothing can be compared
                seen = kept_bytes(_segments(device), device.index)
            if abs(unused - seen) > SURE_BYTES:
                self._is_expandable, self._look_from = False, float("inf")
        self.kept_bytes, self.unknown_because = max(0, unused), None

    def look(self, device: Device | None) -> None:
        """Learn from the allocator's segments: once, and where they are expandable again after a while.

        It walks all of them, while the engine waits: on the main thread alone, and only where they are few.
        """
        if device is None or device.is_host_memory or not on_main_thread():
            return
        began = self.clock()
        if began < self._look_from:
            return
        try:
            segments = _segments(device)
            seen = kept_bytes(segments, device.index)
            self._is_expandable = any(segment.get("is_expandable") for segment in _of(segments, device.index))
            if self.kept_bytes is None or self._is_expandable:  # a release has shown it better than one look does
                self.kept_bytes = seen
            self.unknown_because = None
        except Exception as error:  # noqa: BLE001 - one figure stays unknown, or old; `memory` says why
            self.unknown_because = describe(error)
        pause = max(LOOK_AGAIN_SECONDS, LOOK_SHARE * (self.clock() - began))
        self._look_from = began + pause if self._is_expandable else float("inf")


def _unsplit_bytes(figures: AllocatorFigures) -> int | None:
    if figures.reserved_bytes is None or figures.allocated_bytes is None:
        return None
    return figures.reserved_bytes - figures.allocated_bytes - (figures.inactive_split_bytes or 0)


def _segments(device: Device) -> list[Mapping[str, Any]]:
    blocks = device.block_count()
    if blocks is None or blocks > MAX_BLOCKS:
        count = "an unknown number of" if blocks is None else blocks
        raise UnreadableError(f"the allocator has {count} blocks, too many to walk; the first release will show it")
    return device.segments()


def kept_bytes(segments: Iterable[Mapping[str, Any]], index: int | None) -> int:
    """Return the free bytes that `empty_cache` would keep and that are not in torch's `inactive_split_bytes`.

    The segments are those of `torch.<type>.memory_snapshot`, of every device that the process uses. Raises
    UnreadableError where they do not name their pool.
    """
    kept = 0
    for segment in _of(segments, index):
        pool = segment.get("segment_pool_id")
        if pool is None:
            raise UnreadableError("torch does not show the pool of a segment; the first release will show what is kept")
        is_private = tuple(pool) != _NO_POOL
        if segment.get("is_expandable") and not is_private:
            # A mapping begins and ends with a page; of a free block only whole pages are unmapped.
            page = _PAGES.get(str(segment.get("segment_type")), _PAGES["large"])
            start = 0
            for block in segment["blocks"]:
                end = start + block["size"]
                if block["state"] == "inactive":
                    pages = max(0, end // page - -(-start // page))
                    kept += block["size"] - pages * page
                start = end
        # A segment of several blocks is split, and its free ones are counted by torch.
        elif is_private and (segment.get("is_expandable") or len(segment["blocks"]) == 1):
            kept += sum(block["size"] for block in segment["blocks"] if block["state"] == "inactive")
    return kept


def _of(segments: Iterable[Mapping[str, Any]], index: int | None) -> list[Mapping[str, Any]]:
    return [segment for segment in segments if segment.get("device", index) == index]


class AllocationHistory:
    """The history of torch's allocations, with Python's stacks, as far as this package turned it on.

    It ends without a timer. Turning it off takes torch's own locks, which belong to the worker's main thread: so its
    end is checked there, after each step and in each operation. Meanwhile it does not grow beyond its ring. A history
    that other code turned on is left alone.
    """

    def __init__(self) -> None:
        self._device: Device | None = None
        self._until = 0.0
        self._wrapper: object = None
        self._worker: Callable[[], Any] = lambda: None

    @property
    def is_on(self) -> bool:
        return self._device is not None

    def start(self, worker: object, device: Device, seconds: float, entries: int) -> None:
        """Turn it on, on the main thread only. Raises UnavailableError without one, RefusedError where others have."""
        record = device.history_switch()
        if record is None:
            raise UnavailableError(f"PyTorch keeps no allocation history on {device.type}; it does on npu and cuda")
        if not self.is_on and device.records_history():
            raise RefusedError("torch records its history already, or does not show it: other code's is left alone")
        # Python's frames alone: those of C++ cost more to read than all the rest (torch 2.13.0 cuda/memory.py:892).
        record(enabled="all", context="alloc", stacks="python", max_entries=entries)
        self._until = time.monotonic() + seconds
        if self.is_on:
            return
        self._device = device
        self._worker = weakref.ref(worker)
        history = weakref.ref(self)

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def step(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
                try:
                    return method(*arguments, **named)
                finally:
                    alive = history()
                    if alive is not None:
                        alive.end_if_due()

            self._wrapper = step
            return step

        wrap_method(worker, "execute_model", make)

    def stop(self) -> None:
        """Turn it off, if this turned it on; on the main thread only. Stacks of blocks in use stay."""
        device, self._device = self._device, None
        if device is None:
            return
        worker = self._worker()
        if worker is not None and self._wrapper is not None:
            unwrap_method(worker, "execute_model", self._wrapper)
        self._wrapper = None
        record = device.history_switch()
        if record is not None:
            record(enabled=None)

    def end_if_due(self) -> None:
        """Turn it off when its time is over, on the main thread only; never raises."""
        if self._device is not None and time.monotonic() >= self._until and on_main_thread():
            with suppress(Exception):  # the engine's step goes on, whatever torch says
                self.stop()

    def seconds_left(self) -> float | None:
        return max(0.0, self._until - time.monotonic()) if self.is_on else None
