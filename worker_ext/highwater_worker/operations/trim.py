"""`trim`: move the least recently used encoder outputs to host memory; the next access brings each back.

It drops nothing: to the engine every entry is still there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from highwater_worker.devices import device_of
from highwater_worker.encoder_cache.encoder_outputs import encoder_cache_block, find_encoder_cache, needed_hashes
from highwater_worker.errors import BadPayloadError, RefusedError
from highwater_worker.notes import Notes
from highwater_worker.operations.operation import Operation
from highwater_worker.operations.payload import integer, number
from highwater_worker.spill.host_budget import read_host_budget
from highwater_worker.spill.mover import Mover
from highwater_worker.spill.spill_plan import SpillPlan, Target, make_plan
from highwater_worker.spill.spilling import spilled_entries, watch, way_back_of
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from highwater_worker.encoder_cache.spilling_dict import SpillingDict

MAX_SECONDS = number(0, 60, default=0.2)
"""The time that a call may move entries: the engine waits meanwhile, and goes on between two calls."""


def trim(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    started = time.perf_counter()
    deadline = started + arguments["max_seconds"]
    target = Target(*(arguments[name] for name in Target._fields))
    _check_one(target)
    notes, state, device = Notes(), state_of(worker), device_of(worker)
    cache = watch(worker, device, state)
    mover = Mover(device, notes, deadline)
    plan = _plan(worker, cache, target, mover, notes)
    if cache is not None and plan.groups and plan.asked_bytes != 0:
        _spill(worker, cache, plan, arguments, mover)
    if device.type == "cpu" and mover.entries:
        notes.add("spilled_bytes", "device and host memory are the same on a CPU worker: this gave nothing back")
    return {
        "kind": _kind(worker),
        "asked_bytes": plan.asked_bytes,
        "spilled_entries": mover.entries,
        "spilled_bytes": mover.device_bytes,
        "host_bytes_added": mover.host_bytes,
        "complete": mover.remaining_entries == 0,
        "remaining_entries": mover.remaining_entries,
        "remaining_bytes": mover.remaining_bytes,
        "kept": {
            "needed_entries": plan.kept_as_needed,
            "over_budget_entries": mover.over_budget,
            "unspillable_entries": plan.unspillable + mover.failed,
        },
        "encoder_cache": encoder_cache_block(worker, device.type, state.sightings, state.ledger),
        "copy_seconds": round(mover.seconds, 6),
        "notes": notes.as_list(),
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation(
    "trim",
    {
        "free_bytes": integer(0).or_null(),
        "keep_bytes": integer(0).or_null(),
        "idle_seconds": number(0).or_null(),
        "host_budget_bytes": integer(0).or_null(),
        "max_seconds": MAX_SECONDS,
    },
    trim,
)


def _spill(worker: object, cache: SpillingDict, plan: SpillPlan, arguments: Mapping[str, Any], mover: Mover) -> None:
    way_back = way_back_of(cache)
    reserve = way_back.reserve
    largest = max(group.nbytes for group in plan.groups)
    if sum(group.nbytes for group in plan.groups) <= reserve.growth(largest):
        mover.notes.add(
            "spilled_entries",
            f"the device would gain nothing: {largest} bytes are kept for the way back, as much as all of them have",
        )
        return
    taken = sum(value.host_bytes for value in spilled_entries(cache).values())
    way_back.host_budget_bytes = arguments["host_budget_bytes"]
    budget = read_host_budget(worker, way_back.host_budget_bytes, taken, mover.notes)
    # What is to be kept of the cache is a matter of the cache alone.
    costs = None if arguments["keep_bytes"] is not None else reserve
    mover.spill(cache, plan.groups, plan.asked_bytes, budget.left, costs)
    way_back.settle(cache, mover.notes, mover.device_bytes)
    if mover.over_budget and not mover.entries and not mover.failed:
        raise RefusedError(f"{budget}: no entry fits, and {mover.over_budget} stay on the device")


def _check_one(target: Target) -> None:
    given = [name for name, value in target._asdict().items() if value is not None]
    if len(given) > 1:
        raise BadPayloadError(f"payload keys {given[0]!r} and {given[1]!r} exclude each other; give one of them")


def _kind(worker: object) -> str | None:
    found = find_encoder_cache(worker)
    return found[0] if found else None


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
