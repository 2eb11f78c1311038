"""The operations on the encoder cache's entries.

`encoder_cache` lists them. `trim` moves the least recently used ones to host memory, and `restore` brings them back.
Neither drops an entry: its next access brings it back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from highwater_worker.devices import device_of
from highwater_worker.encoder_cache.index import encoder_cache_figures, read_index
from highwater_worker.encoder_cache.mover import Mover, SpillPlan, Target, read_host_budget
from highwater_worker.encoder_cache.spilling import refuse_now, restorer_of, watch
from highwater_worker.encoder_cache.spilling_dict import Entry, SpillingDict, read_entries, spilling_cache
from highwater_worker.engine_view import encoder_cache_place, needed_hashes
from highwater_worker.errors import BadPayloadError, Notes, RefusedError, printable
from highwater_worker.state import state_of

MAX_ENTRIES = 10_000


def encoder_cache(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """List the largest or oldest entries; equal ones by mm_hash, so that rows do not change places."""
    device, ledger = device_of(worker), state_of(worker).ledger
    entries, index = read_entries(worker), read_index(worker, device)
    figures, ages = index.figures(worker) or {}, index.ages()
    needed = None if entries is None else needed_hashes(worker)
    sharers: dict[tuple[str, int], set[str]] = {}
    for entry in entries or ():
        for key in entry.storages:
            sharers.setdefault(key, set()).add(entry.mm_hash)

    def order(entry: Entry) -> tuple[float, str]:
        return -(ages.get(entry.mm_hash, 0.0) if arguments["sort"] == "age" else entry.nbytes), entry.mm_hash

    def row(entry: Entry) -> dict[str, Any]:
        only = entry.tensors[0] if len(entry.tensors) == 1 else None
        on_device = any(storage.device_type == device.type for storage in entry.storages.values())
        return {
            "mm_hash": printable(entry.mm_hash),
            "shape": None if only is None else [int(size) for size in only.shape],
            "dtype": None if only is None else str(only.dtype).removeprefix("torch."),
            "bytes": entry.nbytes,
            "storage_bytes": sum(storage.nbytes for storage in entry.storages.values()),
            "shared_with": len(set().union(*(sharers[key] for key in entry.storages)) - {entry.mm_hash}),
            "age_seconds": round(ages.get(entry.mm_hash, 0.0), 3),
            "idle_seconds": None if entry.idle_seconds is None else round(entry.idle_seconds, 3),
            "residency": "device" if on_device else "host",
            "referenced": None if needed is None else entry.mm_hash in needed,
        }

    return {
        "present": entries is not None,
        "entries": [row(entry) for entry in sorted(entries or (), key=order)[: arguments["limit"]]],
        "entries_total": len(entries or ()),
        "storages": len(sharers),
        "device_bytes": figures.get("device_bytes", 0),
        "host_bytes": figures.get("host_bytes", 0),
        "capacity_embeds": figures.get("capacity_embeds"),
        **ledger.figures(),
    }


def trim(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Move entries until target or time is reached; raises BadPayloadError for keys that exclude each other."""
    deadline = time.perf_counter() + arguments["max_seconds"]
    target = Target(*(arguments[name] for name in Target._fields))
    given = [name for name, value in target._asdict().items() if value is not None]
    if len(given) > 1:
        raise BadPayloadError(f"payload keys {given[0]!r} and {given[1]!r} exclude each other; give one of them")
    notes, device = Notes(), device_of(worker)
    place, cache = encoder_cache_place(worker), watch(worker, device)
    mover = Mover(device, notes, deadline)
    plan = SpillPlan([], target.asked_bytes(0), 0, 0)
    if cache is None:
        notes.add("encoder_cache", "this worker has none: a text model, or a later pipeline stage")
    elif not cache:
        notes.add("encoder_cache", "it is empty")
    else:
        plan = mover.plan(worker, cache, target)
        why = "the runner does not show what running requests need: nothing was held back"
        notes.missing("kept.needed_entries", plan.kept_as_needed, why)
        if plan.groups:
            _spill(worker, cache, plan, arguments, mover)
    if device.is_host_memory and mover.entries:
        notes.add("spilled_bytes", "device and host memory are the same on a CPU worker: this gave nothing back")
    return {
        "kind": None if place is None else place.kind,
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
