"""`restore`: bring every encoder output that lies in host memory back to the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from highwater_worker.devices import device_of
from highwater_worker.encoder_cache.encoder_outputs import encoder_cache_block, spilling_cache
from highwater_worker.notes import Notes
from highwater_worker.operations.operation import Operation
from highwater_worker.operations.trim import MAX_SECONDS
from highwater_worker.spill.mover import Mover
from highwater_worker.spill.spilling import refuse_now, spilled_entries, way_back_of
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def restore(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    started = time.perf_counter()
    notes, state, device = Notes(), state_of(worker), device_of(worker)
    cache = spilling_cache(worker)
    mover = Mover(device, notes, started + arguments["max_seconds"])
    if cache is not None and spilled_entries(cache):
        refuse_now(worker)
        way_back = way_back_of(cache)
        mover.bring_back(cache, way_back.reserve)
        way_back.settle(cache, notes)
    else:
        notes.add("restored_entries", "nothing lies in host memory")
    return {
        "restored_entries": mover.entries,
        "restored_bytes": mover.device_bytes,
        "left_entries": mover.failed,
        "complete": mover.remaining_entries == 0,
        "remaining_entries": mover.remaining_entries,
        "remaining_bytes": mover.remaining_bytes,
        "encoder_cache": encoder_cache_block(worker, device.type, state.sightings, state.ledger),
        "copy_seconds": round(mover.seconds, 6),
        "notes": notes.as_list(),
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation("restore", {"max_seconds": MAX_SECONDS}, restore)
