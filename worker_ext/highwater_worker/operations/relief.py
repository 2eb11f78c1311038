"""The operations that give memory back: `release`, `trim` and `restore`.

`release` frees no tensor: a block goes back once the last view of its storage is gone. What the allocator still keeps
after that, no release gives back; the worker remembers it. `trim` moves the least recently used encoder outputs to host
memory, and `restore` brings them back. Neither drops an entry: its next access brings it back.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

from highwater_worker.devices import Device, device_of, read_host
from highwater_worker.encoder_cache.sleep import asleep_tags
from highwater_worker.encoder_cache.spilling_dict import SpillingDict, spilling_cache
from highwater_worker.engine_view import encoder_cache_kind, needed_hashes, refuse_suspended
from highwater_worker.errors import BadPayloadError, Notes, RefusedError
from highwater_worker.memory.allocator import AllocatorReserve
from highwater_worker.recorder.encoder_index import encoder_cache_figures
from highwater_worker.spill.mover import Mover
from highwater_worker.spill.plan import SpillPlan, Target, make_plan, read_host_budget
from highwater_worker.spill.spilling import refuse_now, restorer_of, watch
from highwater_worker.state import state_of


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
    mechanism = device.give_back()
    # After the device's: copies to the host that are done by now let go of their pinned blocks.
    notes.attempt("freed_pinned_bytes", device.give_back_pinned)
    after = _figures(device, Notes(), None if is_asleep else state_of(worker).allocator_reserve)
    if mechanism == "unsupported":
        notes.add("mechanism", "the C library offers no way to return free memory to the kernel")
    # On CPU by the process's own size: the machine's free memory moves with every process.
    sizes = (after["rss_bytes"], before["rss_bytes"]), (before["free_bytes"], after["free_bytes"])
    return {
        "before": before,
        "after": after,
        "freed_bytes": _gain(*sizes[not device.is_host_memory]),  # negative where others allocated meanwhile
        "freed_pinned_bytes": _gain(after["pinned_bytes"], before["pinned_bytes"]),
        "gc_collected": collected,
        "mechanism": mechanism,
        "notes": notes.as_list(),
    }


def _figures(device: Device, notes: Notes, learning: AllocatorReserve | None = None) -> dict[str, int | None]:
    host = read_host(notes)
    space = notes.attempt("free_bytes", lambda: device.space(host))
    torch = device.allocator(notes)
    if learning is not None:
        learning.learn_after_release(device, torch)
    return {
        "free_bytes": space.free_bytes if space else None,
        "reserved_bytes": torch.reserved_bytes,
        "allocated_bytes": torch.allocated_bytes,
        "rss_bytes": host.rss_bytes,
        "pinned_bytes": notes.attempt("pinned_bytes", device.pinned_bytes),
    }


def _gain(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


# --- encoder outputs ---


def trim(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Move entries until target or time is reached; raises BadPayloadError for keys that exclude each other."""
    deadline = time.perf_counter() + arguments["max_seconds"]
    target = Target(*(arguments[name] for name in Target._fields))
    given = [name for name, value in target._asdict().items() if value is not None]
    if len(given) > 1:
        raise BadPayloadError(f"payload keys {given[0]!r} and {given[1]!r} exclude each other; give one of them")
    notes, device = Notes(), device_of(worker)
    cache = watch(worker, device, state_of(worker))
    mover = Mover(device, notes, deadline)
    plan = _plan(worker, cache, target, mover, notes)
    if cache is not None and plan.groups and plan.asked_bytes != 0:
        _spill(worker, cache, plan, arguments, mover)
    if device.is_host_memory and mover.entries:
        notes.add("spilled_bytes", "device and host memory are the same on a CPU worker: this gave nothing back")
    return {
        "kind": encoder_cache_kind(worker),
        "asked_bytes": plan.asked_bytes,
        "spilled_entries": mover.entries,
        "spilled_bytes": mover.device_bytes,
        "host_bytes_added": mover.host_bytes,
        **mover.left(),
        "kept": {
            "needed_entries": plan.kept_as_needed,
            "over_budget_entries": mover.over_budget,
            "unspillable_entries": plan.unspillable + mover.failed,
        },
        "encoder_cache": encoder_cache_figures(worker, device),
        "copy_seconds": round(mover.seconds, 6),
        "notes": notes.as_list(),
    }


def _plan(worker: object, cache: SpillingDict | None, target: Target, mover: Mover, notes: Notes) -> SpillPlan:
    if not cache:
        reason = "it is empty" if cache is not None else "this worker has none: a text model, or a later pipeline stage"
        notes.add("encoder_cache", reason)
        return SpillPlan([], target.asked_bytes(0), 0, 0)
    needed = needed_hashes(worker)
    if needed is None:
        # No danger: an entry that is needed after all comes back, later by a copy.
        notes.add("kept.needed_entries", "the runner does not show what running requests need: nothing was held back")
    plan = make_plan(cache, target, mover.copies.can_take, needed, mover.device_type)
    return plan if needed is not None else plan._replace(kept_as_needed=None)


def _spill(worker: object, cache: SpillingDict, plan: SpillPlan, arguments: Mapping[str, Any], mover: Mover) -> None:
    restorer = restorer_of(cache)
    largest = max(group.nbytes for group in plan.groups)
    if sum(group.nbytes for group in plan.groups) <= restorer.reserve.growth(largest):
        mover.notes.add(
            "spilled_entries",
            f"the device would gain nothing: {largest} bytes are kept for the way back, as much as all of them have",
        )
        return
    restorer.host_budget_bytes = arguments["host_budget_bytes"]
    budget = read_host_budget(worker, restorer.host_budget_bytes, cache.host_bytes(), mover.notes)
    # `keep_bytes` limits the cache alone, whatever the reserve takes.
    costs = None if arguments["keep_bytes"] is not None else restorer.reserve
    mover.spill(cache, plan.groups, plan.asked_bytes, budget.left, costs)
    restorer.settle(cache, mover.notes, mover.device_bytes)
    if mover.over_budget and not mover.entries and not mover.failed:
        raise RefusedError(f"{budget}: no entry fits, and {mover.over_budget} stay on the device")


def restore(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Bring every entry back, until the device is full or the time is up."""
    deadline = time.perf_counter() + arguments["max_seconds"]
    notes, device = Notes(), device_of(worker)
    cache = spilling_cache(worker)
    mover = Mover(device, notes, deadline)
    if cache is not None and cache.spilled():
        refuse_now(worker)
        restorer = restorer_of(cache)
        mover.bring_back(cache, restorer.reserve)
        restorer.settle(cache, notes)
    else:
        notes.add("restored_entries", "nothing lies in host memory")
    return {
        "restored_entries": mover.entries,
        "restored_bytes": mover.device_bytes,
        "left_entries": mover.failed,
        **mover.left(),
        "encoder_cache": encoder_cache_figures(worker, device),
        "copy_seconds": round(mover.seconds, 6),
        "notes": notes.as_list(),
    }
