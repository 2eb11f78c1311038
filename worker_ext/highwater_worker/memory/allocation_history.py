"""The history of torch's allocator, turned on for a bounded time: who allocated what, with Python's stack.

It ends without a timer. Turning it off takes torch's own locks, which belong to the worker's main thread; so the end is
looked for there, after each step and in each of our operations. While neither comes, nothing is allocated, and the
history does not grow; it is a ring of bounded length anyway. A history that somebody else turned on stays theirs.
"""

from __future__ import annotations

import functools
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from highwater_worker.devices.accelerator import on_main_thread
from highwater_worker.errors import RefusedError, UnavailableError
from highwater_worker.wrapping import unwrap_method, wrap_method

if TYPE_CHECKING:
    from collections.abc import Callable

    from highwater_worker.devices import Device

_STEP = "execute_model"


class AllocationHistory:
    """One worker's history, as far as we turned it on."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._until = 0.0
        self._wrapper: object = None
        self._worker: Callable[[], Any] = lambda: None

    @property
    def is_on(self) -> bool:
        """Whether we turned it on, and have not turned it off."""
        return self._device is not None

    def start(self, worker: object, device: Device, seconds: float, entries: int) -> None:
        """Turn it on, or on for longer; the main thread's.

        Args:
            worker: Whose steps look for the end.
            device: Its device.
            seconds: From now on.
            entries: That the ring has.

        Raises:
            UnavailableError: This device, or this version of torch, has none.
            RefusedError: Somebody else turned it on.
        """
        record = device.family.history_switch()
        if record is None:
            raise UnavailableError(f"PyTorch keeps no allocation history on {device.type}; it does on npu and cuda")
        if not self.is_on and device.family.records_history():
            raise RefusedError("torch records its history already, or does not say: somebody else's is left alone")
        # Python's frames alone: those of C++ cost more to read than all the rest (torch 2.13.0 cuda/memory.py:892).
        record(enabled="all", context="alloc", stacks="python", max_entries=entries)
        self._until = time.monotonic() + seconds
        if not self.is_on:
            self._device = device
            self._watch(worker)

    def stop(self) -> bool:
        """Turn it off, if we turned it on; the main thread's. Stacks of what is in use stay with their blocks."""
        device, self._device = self._device, None
        if device is None:
            return False
        worker = self._worker()
        if worker is not None and self._wrapper is not None:
            unwrap_method(worker, _STEP, self._wrapper)
        self._wrapper = None
        record = device.family.history_switch()
        if record is not None:
            record(enabled=None)
        return True

    def end_if_due(self) -> None:
        """Turn it off when its time is over; does nothing on another thread than the main one, and never raises."""
        if self._device is not None and time.monotonic() >= self._until and on_main_thread():
            with suppress(Exception):  # the engine's step goes on, whatever torch says
                self.stop()

    def seconds_left(self) -> float | None:
        """Return how long it stays on; None while it is off."""
        return max(0.0, self._until - time.monotonic()) if self.is_on else None

    def _watch(self, worker: object) -> None:
        history = weakref.ref(self)
        self._worker = weakref.ref(worker)

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def step(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
                try:
                    return method(*arguments, **named)
                finally:
                    found = history()
                    if found is not None:
                        found.end_if_due()

            self._wrapper = step
            return step

        wrap_method(worker, _STEP, make)
