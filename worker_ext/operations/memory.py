"""`memory`: where this worker's device memory is.

It reads counters and metadata. It refuses to touch tensor data, to wait for the device, or to allocate on it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from worker_ext.devices import describe_device
from worker_ext.encoder_outputs import encoder_cache_block, odd_absence
from worker_ext.host import read_host
from worker_ext.memory_parts import (
    NO_DEVICE,
    look_at_segments_once,
    pinned_bytes,
    read_allocator,
    read_budget,
    read_kv_cache,
    read_space,
)
from worker_ext.notes import Notes
from worker_ext.operations.operation import Operation
from worker_ext.sleep import asleep_tags
from worker_ext.state import state_of
from worker_ext.weights import counting_caveat, weights_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker_ext.devices import Device
    from worker_ext.state import WorkerState


def memory(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the answer's body."""
    started = time.perf_counter()
    notes, state = Notes(), state_of(worker)
    device, entry = describe_device(worker, notes)
    host = read_host(notes)
    space = read_space(worker, device, host, notes)
    look_at_segments_once(worker, device, state.allocator_reserve)
    torch = read_allocator(device, notes)
    if state.allocator_reserve.kept_bytes is None and state.allocator_reserve.unknown_because is not None:
        notes.add("releasable_bytes", state.allocator_reserve.unknown_because)
    body = {
        "device": entry,
        **space._asdict(),
        "torch": torch._asdict(),
        "releasable_bytes": state.allocator_reserve.releasable_bytes(torch),
        **_components(worker, device, state, notes),
        "asleep_tags": _asleep_tags(worker, state, notes),
        "budget": read_budget(worker, notes),
        "host_memory": {**host._asdict(), "pinned_bytes": pinned_bytes(device, notes)},
    }
    return {**body, "notes": notes.as_list(), "elapsed_ms": round((time.perf_counter() - started) * 1000, 3)}


OPERATION = Operation("memory", {}, memory)


def _asleep_tags(worker: object, state: WorkerState, notes: Notes) -> list[str] | None:
    reason = "the engine may have fallen asleep before the first call, and its allocator does not tell"
    return notes.missing("asleep_tags", asleep_tags(worker, state.sleep), reason)


def _components(worker: object, device: Device | None, state: WorkerState, notes: Notes) -> dict[str, Any]:
    names = ("weights_bytes", "kv_cache_bytes", "kv_cache_reserved_bytes", "encoder_cache")
    if device is None:
        for name in names:
            notes.add(name, NO_DEVICE)
        return dict.fromkeys(names)
    kind = device.type
    weights = notes.attempt("weights_bytes", lambda: _weights(worker, kind, state, notes))
    kv_cache = read_kv_cache(worker, kind, state.residency, notes)
    encoder = notes.attempt("encoder_cache", lambda: _encoder_cache(worker, kind, state, notes))
    return dict(zip(names, (weights, *kv_cache, encoder)))


def _weights(worker: object, kind: str, state: WorkerState, notes: Notes) -> int:
    size, caveat = weights_bytes(worker, kind, state), counting_caveat(worker, kind)
    if caveat is not None:
        notes.add("weights_bytes", caveat)
    return size


def _encoder_cache(worker: object, kind: str, state: WorkerState, notes: Notes) -> dict[str, Any] | None:
    block = encoder_cache_block(worker, kind, state)
    odd = odd_absence(worker) if block is None else None
    if odd is not None:
        notes.add("encoder_cache", odd)
    return block
