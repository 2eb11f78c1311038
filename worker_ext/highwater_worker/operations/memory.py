"""`memory`: the parts of this worker's device memory. `release`: give back what the allocator keeps unused.

`release` frees no tensor: a block goes back once the last view of its storage is gone. What the allocator still keeps
after that, no release gives back; the worker remembers it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

from highwater_worker.devices import Device, device_of
from highwater_worker.devices.family import read_host
from highwater_worker.encoder_cache.sleep import asleep_tags
from highwater_worker.engine_view import refuse_suspended
from highwater_worker.errors import Notes
from highwater_worker.memory.allocator import AllocatorReserve
from highwater_worker.recorder.reading import Depth, MemoryReader
from highwater_worker.state import state_of


def memory(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    reader = MemoryReader()
    return {**reader.read(worker, Depth.ALL, time.monotonic()), "notes": reader.notes}


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
