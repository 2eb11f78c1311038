"""The operations of `highwater_rpc`. To add one: a function in this folder, and a row of `OPERATIONS`."""

from __future__ import annotations

from collections.abc import Mapping

from highwater_worker.operations import reading, relief, writing
from highwater_worker.operations.operation import Operation, boolean, choice, integer, number, text
from highwater_worker.recorder.begin import MAX_RATE, MAX_SECONDS, MIN_RATE, MIN_SECONDS, RATE, SECONDS

_DIRECTORY = text(r"/[^\0]{0,999}", "an absolute path")
_INSTANCE = text("[0-9a-f]{16}", "16 hexadecimal digits, in small letters")
_MAX_SECONDS = number(0, 60, default=0.2)
"""The time that a call may move entries: the engine waits meanwhile, and goes on between two calls."""

OPERATIONS: Mapping[str, Operation] = {
    "budget": Operation(reading.budget, is_timed=False),
    "memory": Operation(reading.memory),
    "encoder_cache": Operation(
        reading.encoder_cache,
        {"limit": integer(0, reading.MAX_ENTRIES, default=100), "sort": choice("bytes", "age")},
        is_timed=False,
    ),
    "release": Operation(relief.release),
    "trim": Operation(
        relief.trim,
        {
            "free_bytes": integer(0).or_null(),
            "keep_bytes": integer(0).or_null(),
            "idle_seconds": number(0).or_null(),
            "host_budget_bytes": integer(0).or_null(),
            "max_seconds": _MAX_SECONDS,
        },
    ),
    "restore": Operation(relief.restore, {"max_seconds": _MAX_SECONDS}),
    "recorder_start": Operation(
        writing.recorder_start,
        {
            "directory": _DIRECTORY,
            "instance": _INSTANCE,
            "rate": number(MIN_RATE, MAX_RATE, default=RATE),
            "seconds": number(MIN_SECONDS, MAX_SECONDS, default=SECONDS),
        },
    ),
    "recorder_stop": Operation(writing.recorder_stop, {"instance": _INSTANCE}, is_timed=False),
    "snapshot": Operation(
        writing.snapshot,
        {
            "directory": _DIRECTORY.or_null(),
            "name": text("[0-9A-Za-z_]{1,64}", "1 to 64 letters, digits and underscores").or_null(),
            "dry_run": boolean(default=False),
        },
    ),
    "record_stacks": Operation(
        writing.record_stacks, {"minutes": number(0, 60, default=10), "entries": integer(1, 200_000, default=50_000)}
    ),
}
