"""`memory`: where this worker's device memory is.

It reads counters and metadata. It refuses to touch tensor data, to wait for the device, or to allocate on it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from highwater_worker.devices import describe_device
from highwater_worker.devices.host import read_host
from highwater_worker.encoder_cache.encoder_outputs import encoder_cache_figures, odd_absence, read_encoder_outputs
from highwater_worker.encoder_cache.sleep import asleep_tags
from highwater_worker.errors import RefusedError, UnreadableError
from highwater_worker.memory.memory_parts import (
    NO_DEVICE,
    look_at_segments_once,
    pinned_bytes,
    read_allocator,
    read_budget,
    read_kv_cache,
    read_space,
)
from highwater_worker.memory.weights import counting_caveat, weights_bytes
from highwater_worker.notes import Notes
from highwater_worker.operations.operation import Operation
from highwater_worker.spill.host_copies import HostCopies
from highwater_worker.spill.trimmable import Groups, movability, trimmable_bytes
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from highwater_worker.devices import Device
    from highwater_worker.devices.host import HostMemory
    from highwater_worker.encoder_cache.encoder_outputs import EncoderOutputs
    from highwater_worker.memory.storages import Storage
    from highwater_worker.state import WorkerState


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
        **_components(worker, device, state, host, notes),
        "asleep_tags": _asleep_tags(worker, state, notes),
        "budget": read_budget(worker, notes),
        "host_memory": {**host._asdict(), "pinned_bytes": pinned_bytes(device, notes)},
    }
    return {**body, "notes": notes.as_list(), "elapsed_ms": round((time.perf_counter() - started) * 1000, 3)}


OPERATION = Operation("memory", {}, memory)


def _asleep_tags(worker: object, state: WorkerState, notes: Notes) -> list[str] | None:
    reason = "the engine may have fallen asleep before the first call, and its allocator does not show it"
    return notes.missing("asleep_tags", asleep_tags(worker, state.sleep), reason)


def _components(
    worker: object, device: Device | None, state: WorkerState, host: HostMemory, notes: Notes
) -> dict[str, Any]:
    names = ("weights_bytes", "kv_cache_bytes", "kv_cache_reserved_bytes", "encoder_cache", "trimmable_bytes")
    if device is None:
        for name in names:
            notes.add(name, NO_DEVICE)
        return dict.fromkeys(names)
    kind = device.type
    weights = notes.attempt("weights_bytes", lambda: _weights(worker, kind, state, notes))
    kv_cache = read_kv_cache(worker, kind, state.residency, notes)
    outputs = notes.attempt("encoder_cache", lambda: _encoder_outputs(worker, kind, notes))
    encoder = notes.attempt(
        "encoder_cache", lambda: encoder_cache_figures(worker, outputs, state.sightings, state.ledger)
    )
    trimmable = notes.attempt("trimmable_bytes", lambda: _trimmable(worker, device, outputs, host))
    return dict(zip(names, (weights, *kv_cache, encoder, trimmable)))


def _weights(worker: object, kind: str, state: WorkerState, notes: Notes) -> int:
    size, caveat = weights_bytes(worker, kind, state.weights), counting_caveat(worker, kind)
    if caveat is not None:
        notes.add("weights_bytes", caveat)
    return size


def _encoder_outputs(worker: object, kind: str, notes: Notes) -> EncoderOutputs | None:
    outputs = read_encoder_outputs(worker, kind)
    odd = odd_absence(worker) if outputs is None else None
    if odd is not None:
        notes.add("encoder_cache", odd)
    return outputs


def _trimmable(worker: object, device: Device, outputs: EncoderOutputs | None, host: HostMemory) -> int | None:
    copies, groups = HostCopies(device), Groups(device.type)
    entries = {} if outputs is None else {entry.mm_hash: entry for entry in outputs.entries}
    for entry in entries.values():
        groups.add(movability(entry, copies))

    def storages_of(key: str) -> Iterable[Storage]:
        return entries[key].storages.values() if key in entries else ()

    # No note: why a trim would be refused is the trim's to say, and a cache that cannot be read is noted already.
    with suppress(RefusedError, UnreadableError):
        return trimmable_bytes(worker, device, groups, storages_of, host)
    return None
