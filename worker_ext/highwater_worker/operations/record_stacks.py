"""`record_stacks`: have torch's allocator note who allocates, for so many minutes; a snapshot then names the places."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from highwater_worker.devices import device_of
from highwater_worker.operations.operation import Operation
from highwater_worker.operations.payload import integer, number
from highwater_worker.spill.spilling import refuse_now
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MINUTES = 60
MAX_ENTRIES = 200_000
_ENTRIES = 50_000


def record_stacks(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    started, history = time.perf_counter(), state_of(worker).history
    was_on, minutes = history.is_on, float(arguments["minutes"])
    refuse_now(worker)
    if minutes:
        history.start(worker, device_of(worker), minutes * 60, arguments["entries"])
    else:
        history.stop()
    left = history.seconds_left()
    return {
        "recording": history.is_on,
        "was_recording": was_on,
        "seconds_left": None if left is None else round(left, 1),
        "entries": arguments["entries"] if history.is_on else None,
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation(
    "record_stacks",
    {
        "minutes": number(0, MAX_MINUTES, default=10),
        "entries": integer(1, MAX_ENTRIES, default=_ENTRIES),
    },
    record_stacks,
)
