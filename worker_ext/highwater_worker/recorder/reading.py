"""One worker's memory, part by part: the response to `memory`, and the recorder's samples, many times a second.

It reads counters and metadata, never tensor data, waits for no device and allocates on none. Samples are read on the
engine's own thread, between two steps. There they can neither meet the engine in the middle of something nor wait for a
lock that the engine holds: torch's allocator is called with Python's lock held, and sleep mode's allocator calls Python
with its own lock held (vllm 0.32.0 device_allocator/cumem.py:204), so that from another thread both could wait without
end.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from highwater_worker.devices import (
    NO_DEVICE,
    Device,
    HostMemory,
    describe_device,
    device_of,
    read_allocator,
    read_host,
    read_space,
)
from highwater_worker.encoder_cache.index import EncoderIndex, index_of_operations
from highwater_worker.engine_view import note_odd_absence, suspending_backend
from highwater_worker.errors import Notes
from highwater_worker.kernel.proc import rss_bytes
from highwater_worker.memory.engine_budget import read_budget
from highwater_worker.memory.storages import KvCache, counting_caveat, read_kv_cache, weights_bytes
from highwater_worker.state import WorkerState, asleep_tags, state_of

_SELDOM_SECONDS = 10.0
"""The time for which the KV cache's size and the pools that are asleep are reused: a large model has hundreds of
layers, and as many allocations of sleep mode; the pool is made once, and a call that puts it to sleep is seen."""


class Depth(Enum):
    """The part of the memory that is read; the rest is as it was read last."""

    ANSWER = auto()
    """Everything, the device's identity and the budget too, with a note on every null: the response to `memory`."""
    FULL = auto()
    """The encoder cache to its end, and the process's resident size: no request waits for the engine."""
    STEP = auto()
    """Between two steps."""


class MemoryReader:
    """Reads one worker, and keeps what is read once or seldom; for samples used on the engine's thread only."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._seldom_due = float("-inf")
        self._kv_cache = KvCache()
        self._asleep_tags: list[str] | None = None
        self.index: EncoderIndex | None = None
        """The encoder cache's entries; None before `read`, and where the device is not known."""
        self.host = HostMemory()
        """The container's and the machine's memory, as another thread read it last; not of `Depth.ANSWER`."""
        self.notes: list[dict[str, str]] = []
        """The values that could not be read, as of the last time that read everything, or not even the device."""

    def start_changed(self) -> None:
        """Read again what changes while the worker starts, and hardly ever afterwards."""
        self._seldom_due = float("-inf")

    def read(self, worker: object, depth: Depth, now: float, change: object = None) -> dict[str, Any]:
        """Return the memory, unknown values null; `now` and `change` are those of `EncoderIndex.update`."""
        notes, state, is_answer, is_full = Notes(), state_of(worker), depth is Depth.ANSWER, depth is not Depth.STEP
        is_due = is_answer or now >= self._seldom_due
        described = self._find_device(worker, notes, is_described=is_answer)
        device = self._device
        host = read_host(notes) if is_answer else self._recent_host(notes, is_full=is_full)
        space = read_space(worker, device, host, notes)
        reserve = state.allocator_reserve
        # For a sample not before the graphs are captured: their pools are what the look is for.
        can_look = is_answer or state.start is None or state.start.is_over
        if can_look and suspending_backend(worker) is None:
            notes.attempt("releasable_bytes", lambda: reserve.look(device))
        torch = read_allocator(device, notes)
        if is_full or is_due:
            self._asleep_tags = notes.attempt("asleep_tags", lambda: asleep_tags(worker))
        weights = self._weights(worker, state, depth, notes)
        if device is not None and is_due:
            self._seldom_due = now + _SELDOM_SECONDS
            self._kv_cache = read_kv_cache(worker, device.type, state.residency, notes)

        def read_encoder_cache() -> dict[str, Any] | None:
            if self.index is None:
                return None
            self.index.update(worker, now, change, host, in_full=is_full)
            figures = self.index.figures(worker)
            if figures is None and is_answer:
                note_odd_absence(worker, "encoder_cache", notes)
            return figures

        encoder_cache = notes.attempt("encoder_cache", read_encoder_cache)
        pinned = None if device is None else notes.attempt("host_memory.pinned_bytes", device.pinned_bytes)
        memory = {
            **space._asdict(),
            "torch": torch._asdict(),
            "releasable_bytes": reserve.releasable_bytes(torch, space),
            # Without a note where it is null: why a trim would be refused is the trim's to say.
            "trimmable_bytes": None if self.index is None else self.index.trimmable_bytes,
            "asleep_tags": self._asleep_tags,
            "weights_bytes": weights,
            "kv_cache_bytes": self._kv_cache.resident_bytes,
            "encoder_cache": encoder_cache,
            "host_memory": {**host._asdict(), "pinned_bytes": pinned},
        }
        if is_answer:
            self._note_nulls(state, notes)
            memory["kv_cache_reserved_bytes"] = self._kv_cache.reserved_bytes
            memory = {"device": described, **memory, "budget": read_budget(worker, notes)}
        if (is_full and is_due) or space.free_bytes is None:  # the reason cannot wait: the device may be lost
            self.notes = notes.as_list()
        return memory

    def _find_device(self, worker: object, notes: Notes, *, is_described: bool) -> dict[str, Any] | None:
        described = None
        if is_described:
            self._device, described = describe_device(worker, notes)
        elif self._device is None:  # tried again where it was not found: the worker may not have been ready
            self._device = notes.attempt("device", lambda: device_of(worker))
        device = self._device
        if self.index is None and device is not None:
            self.index = index_of_operations(worker, device) if is_described else EncoderIndex(device)
        return described

    def _recent_host(self, notes: Notes, *, is_full: bool) -> HostMemory:
        """Return the other thread's reading; of a CPU, or where nothing waits, with the resident size of now.

        To read it takes three system calls, and each lets go of Python's lock: where another thread computes, that can
        cost the engine 5 ms each, until the interpreter gives the lock back.
        """
        if is_full or self._device is None or self._device.is_host_memory:
            return self.host._replace(rss_bytes=notes.attempt("host_memory.rss_bytes", rss_bytes))
        return self.host

    def _weights(self, worker: object, state: WorkerState, depth: Depth, notes: Notes) -> int | None:
        if self._device is None:
            return None
        kind = self._device.type
        size = notes.attempt("weights_bytes", lambda: weights_bytes(worker, kind, state.weights))
        if depth is Depth.ANSWER and size is not None and (caveat := counting_caveat(worker, kind)) is not None:
            notes.add("weights_bytes", caveat)
        return size

    def _note_nulls(self, state: WorkerState, notes: Notes) -> None:
        """Note what is null and raised nothing, and a figure that is old."""
        if self._device is None:
            for part in ("weights", "kv_cache", "kv_cache_reserved", "trimmable"):
                notes.add(f"{part}_bytes", NO_DEVICE)
            notes.add("encoder_cache", NO_DEVICE)
        reserve = state.allocator_reserve
        if reserve.unknown_because is not None:
            is_old = reserve.kept_bytes is not None
            notes.add("releasable_bytes", f"{'it is old: ' if is_old else ''}{reserve.unknown_because}")
        why = "the engine may have fallen asleep before the first call, and its allocator does not show it"
        notes.missing("asleep_tags", self._asleep_tags, why)
