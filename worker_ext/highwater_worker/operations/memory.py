"""`memory`: the parts of this worker's device memory. `release`: give back what the allocator keeps unused.

`memory` reads counters and metadata, never tensor data. `release` frees no tensor: a block goes back once the last view
of its storage is gone. What the allocator still keeps after that, no release gives back; the worker remembers it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from highwater_worker.devices import Device, describe_device, device_of
from highwater_worker.devices.host import HostMemory, read_host
from highwater_worker.encoder_cache.encoder_outputs import note_odd_absence
from highwater_worker.encoder_cache.sleep import asleep_tags
from highwater_worker.errors import Notes
from highwater_worker.memory.allocator import AllocatorReserve
from highwater_worker.memory.memory_parts import (
    NO_DEVICE,
    look_at_segments,
    pinned_bytes,
    read_allocator,
    read_budget,
    read_kv_cache,
    read_space,
    refuse_suspended,
)
from highwater_worker.memory.weights import counting_caveat, weights_bytes
from highwater_worker.recorder.encoder_index import EncoderIndex, read_index
from highwater_worker.state import WorkerState, state_of


def memory(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the parts of the device's memory, without waiting for the device or allocating on it."""
    notes, state = Notes(), state_of(worker)
    device, entry = describe_device(worker, notes)
    host = read_host(notes)
    space = read_space(worker, device, host, notes)
    look_at_segments(worker, device, state.allocator_reserve)
    torch = read_allocator(device, notes)
    if state.allocator_reserve.unknown_because is not None:
        is_old = state.allocator_reserve.kept_bytes is not None
        notes.add("releasable_bytes", f"{'it is old: ' if is_old else ''}{state.allocator_reserve.unknown_because}")
    return {
        "device": entry,
        **space._asdict(),
        "torch": torch._asdict(),
        "releasable_bytes": state.allocator_reserve.releasable_bytes(torch, space),
        **_components(worker, device, state, host, notes),
        "asleep_tags": notes.missing(
            "asleep_tags",
            asleep_tags(worker, state.sleep),
            "the engine may have fallen asleep before the first call, and its allocator does not show it",
        ),
        "budget": read_budget(worker, notes),
        "host_memory": {**host._asdict(), "pinned_bytes": pinned_bytes(device, notes)},
        "notes": notes.as_list(),
    }


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
    index = notes.attempt("encoder_cache", lambda: read_index(worker, device, host))
    encoder = None if index is None else notes.attempt("encoder_cache", lambda: _encoder(worker, index, notes))
    # Without a note where it is null: why a trim would be refused is the trim's to say.
    trimmable = None if index is None else index.trimmable_bytes
    return dict(zip(names, (weights, *kv_cache, encoder, trimmable)))


def _encoder(worker: object, index: EncoderIndex, notes: Notes) -> dict[str, Any] | None:
    figures = index.figures(worker)
    if figures is None:
        note_odd_absence(worker, "encoder_cache", notes)
    return figures


def _weights(worker: object, kind: str, state: WorkerState, notes: Notes) -> int:
    size, caveat = weights_bytes(worker, kind, state.weights), counting_caveat(worker, kind)
    if caveat is not None:
        notes.add("weights_bytes", caveat)
    return size


def release(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Collect garbage, then return the allocator's unused blocks to the device.

    While pools sleep nothing is collected, as garbage may lie in one that is unmapped. The rest is what vLLM itself
    does at a sleep's end (vllm 0.32.0 device_allocator/cumem.py:298), and vllm-ascend does not (0.18 to 0.23, issue
    9563): an operator's workspace stays then.
    """
    notes = Notes()
    refuse_suspended(worker)
    is_asleep = bool(asleep_tags(worker, state_of(worker).sleep))
    device = device_of(worker)
    before = _figures(device, notes)
    collected = 0 if is_asleep else gc.collect()
    mechanism = device.family.give_back(device.index)
    # After the device's: copies to the host that are done by now let go of their pinned blocks.
    notes.attempt("freed_pinned_bytes", device.family.give_back_pinned)
    after = _figures(device, Notes(), None if is_asleep else state_of(worker).allocator_reserve)
    if mechanism == "unsupported":
        notes.add("mechanism", "the C library offers no way to return free memory to the kernel")
    # On CPU by the process's own size: the machine's free memory moves with every process.
    sizes = (after["rss_bytes"], before["rss_bytes"]), (before["free_bytes"], after["free_bytes"])
    return {
        "before": before,
        "after": after,
        "freed_bytes": _gain(*sizes[device.type != "cpu"]),  # negative where others allocated meanwhile
        "freed_pinned_bytes": _gain(after["pinned_bytes"], before["pinned_bytes"]),
        "gc_collected": collected,
        "mechanism": mechanism,
        "notes": notes.as_list(),
    }


def _figures(device: Device, notes: Notes, learning: AllocatorReserve | None = None) -> dict[str, int | None]:
    host = read_host(notes)
    space = notes.attempt("free_bytes", lambda: device.family.space(device.index, host))
    torch = device.family.allocator(device.index, notes)
    if learning is not None:
        learning.learn_after_release(device, torch)
    return {
        "free_bytes": space.free_bytes if space else None,
        "reserved_bytes": torch.reserved_bytes,
        "allocated_bytes": torch.allocated_bytes,
        "rss_bytes": host.rss_bytes,
        "pinned_bytes": notes.attempt("pinned_bytes", device.family.pinned_bytes),
    }


def _gain(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
