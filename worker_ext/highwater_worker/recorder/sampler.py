"""One worker's memory, read many times a second on the engine's own thread, between two steps.

Constant values are read once, expensive ones seldom, and values that need no such thread by another (`host`). Being on
the engine's thread, it can neither meet the engine in the middle of something nor wait for a lock that the engine
holds: torch's allocator is called with Python's lock held, and sleep mode's allocator calls Python with its own lock
held (vllm 0.32.0 device_allocator/cumem.py:204), so that from another thread both could wait without end.
"""

from __future__ import annotations

from typing import Any

from highwater_worker.devices import Device, device_of
from highwater_worker.devices.host import HostMemory, rss_bytes
from highwater_worker.encoder_cache.sleep import asleep_tags
from highwater_worker.errors import Notes
from highwater_worker.memory.kv_cache import Residency
from highwater_worker.memory.memory_parts import (
    look_at_segments,
    pinned_bytes,
    read_allocator,
    read_kv_cache,
    read_space,
)
from highwater_worker.memory.weights import weights_bytes
from highwater_worker.recorder.encoder_index import EncoderIndex
from highwater_worker.state import state_of

_SELDOM_SECONDS = 10.0
"""The time for which the KV cache's size and the pools that are asleep are reused: a large model has hundreds of
layers, and as many allocations of sleep mode; the pool is made once, and a call that puts it to sleep is seen."""


class Sampler:
    """Reads one worker; used on the engine's thread only."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._seldom_due = float("-inf")
        self._kv_cache_bytes: int | None = None
        self._asleep_tags: list[str] | None = None
        self.index: EncoderIndex | None = None
        """The encoder cache's entries; None before `memory`, and where the device is not known."""
        self.host = HostMemory()
        """The container's and the machine's memory, as another thread read it last."""
        self.notes: list[dict[str, str]] = []
        """The values that could not be read, as of the last sample that read everything, or not even the device."""

    def start_changed(self) -> None:
        """Read again what changes while the worker starts, and hardly ever afterwards."""
        self._seldom_due = float("-inf")

    def memory(self, worker: object, now: float, change: object, *, whole: bool) -> dict[str, Any]:
        """Return the memory as the response to `memory` has it, unknown values null; arguments as of `EncoderIndex`."""
        notes, state, reads_all = Notes(), state_of(worker), whole and now >= self._seldom_due
        if self._device is None:  # tried again where it was not found: the worker may not have been ready
            self._device = notes.attempt("device", lambda: device_of(worker))
            self.index = None if self._device is None else EncoderIndex(self._device)
        device = self._device
        host = self._host_memory(device, notes, whole=whole)
        weights, reserve = None, state.allocator_reserve
        if device is not None:
            weights = notes.attempt("weights_bytes", lambda: weights_bytes(worker, device.type, state.weights))
            # Not before the graphs are captured: their pools are what the look is for.
            if state.start is None or state.start.is_over:
                notes.attempt("releasable_bytes", lambda: look_at_segments(worker, device, reserve))
        if whole or now >= self._seldom_due:
            self._asleep_tags = notes.attempt("asleep_tags", lambda: asleep_tags(worker, state.sleep))
        torch = read_allocator(device, notes)
        encoder_cache = self._encoder_cache(worker, now, change, notes, whole=whole)
        space = read_space(worker, device, host, notes)
        memory = {
            **space._asdict(),
            "torch": torch._asdict(),
            "releasable_bytes": reserve.releasable_bytes(torch, space),
            "trimmable_bytes": None if self.index is None else self.index.trimmable_bytes,
            "asleep_tags": self._asleep_tags,
            "weights_bytes": weights,
            "kv_cache_bytes": self._kv_cache(worker, device, state.residency, now, notes),
            "encoder_cache": encoder_cache,
            "host_memory": {**host._asdict(), "pinned_bytes": pinned_bytes(device, notes)},
        }
        if reads_all or space.free_bytes is None:  # the reason cannot wait: the device may be lost
            self.notes = notes.as_list()
        return memory

    def _host_memory(self, device: Device | None, notes: Notes, *, whole: bool) -> HostMemory:
        """Return the other thread's reading; of a CPU, or where nothing waits, with the resident size of now.

        To read it takes three system calls, and each lets go of Python's lock: where another thread computes, that can
        cost the engine 5 ms each, until the interpreter gives the lock back.
        """
        if whole or device is None or device.type == "cpu":
            return self.host._replace(rss_bytes=notes.attempt("host_memory.rss_bytes", rss_bytes))
        return self.host

    def _kv_cache(
        self, worker: object, device: Device | None, residency: Residency, now: float, notes: Notes
    ) -> int | None:
        if device is not None and now >= self._seldom_due:
            self._seldom_due = now + _SELDOM_SECONDS
            self._kv_cache_bytes = read_kv_cache(worker, device.type, residency, notes).resident_bytes
        return self._kv_cache_bytes

    def _encoder_cache(
        self, worker: object, now: float, change: object, notes: Notes, *, whole: bool
    ) -> dict[str, Any] | None:
        index = self.index
        if index is None:
            return None
        notes.attempt("encoder_cache", lambda: index.update(worker, now, change, self.host, whole=whole))
        return notes.attempt("encoder_cache", lambda: index.figures(worker))
