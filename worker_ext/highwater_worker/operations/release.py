"""`release`: collect garbage, then return the blocks that the allocator keeps unused.

It frees no tensor: caches stay as they are. Freed blocks of a shared storage stay until its last view is gone. The
bytes that the allocator then still keeps unused are those that no release gives back; the worker remembers them.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from highwater_worker.devices import device_of
from highwater_worker.devices.host import read_host
from highwater_worker.encoder_cache.sleep import refuse_while_asleep
from highwater_worker.memory.memory_parts import refuse_suspended
from highwater_worker.notes import Notes
from highwater_worker.operations.operation import Operation
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from highwater_worker.devices import Device
    from highwater_worker.memory.allocator_reserve import AllocatorReserve


def release(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the answer's body."""
    started = time.perf_counter()
    notes = Notes()
    refuse_suspended(worker)
    refuse_while_asleep(worker, state_of(worker).sleep)
    device = device_of(worker)
    before = _figures(device, notes)
    collected = gc.collect()
    mechanism = device.family.give_back(device.index)
    # After the device's: copies to the host that are done by now let go of their pinned blocks.
    notes.attempt("freed_pinned_bytes", device.family.give_back_pinned)
    after = _figures(device, Notes(), state_of(worker).allocator_reserve)
    if mechanism == "unsupported":
        notes.add("mechanism", "the C library offers no way to return free memory to the kernel")
    return {
        "before": before,
        "after": after,
        "freed_bytes": _freed_bytes(device, before, after),
        "freed_pinned_bytes": _less(before["pinned_bytes"], after["pinned_bytes"]),
        "gc_collected": collected,
        "mechanism": mechanism,
        "notes": notes.as_list(),
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation("release", {}, release)


def _figures(device: Device, notes: Notes, learning: AllocatorReserve | None = None) -> dict[str, int | None]:
    host = read_host(notes)
    space = notes.attempt("free_bytes", lambda: device.family.space(device.index, host))
    torch = device.family.allocator(device.index, notes)
    if learning is not None:
        learning.learn_after_release(torch)
    return {
        "free_bytes": space.free_bytes if space else None,
        "reserved_bytes": torch.reserved_bytes,
        "allocated_bytes": torch.allocated_bytes,
        "rss_bytes": host.rss_bytes,
        "pinned_bytes": notes.attempt("pinned_bytes", device.family.pinned_bytes),
    }


def _freed_bytes(device: Device, before: Mapping[str, int | None], after: Mapping[str, int | None]) -> int | None:
    """Return what the device gained, negative where it lost meanwhile: others allocate beside us."""
    # On CPU the process's own size says it: the machine's free memory moves with everybody's.
    name, sign = ("rss_bytes", -1) if device.type == "cpu" else ("free_bytes", 1)
    return _less(after[name], before[name], sign)


def _less(first: int | None, second: int | None, sign: int = 1) -> int | None:
    return None if first is None or second is None else sign * (first - second)
