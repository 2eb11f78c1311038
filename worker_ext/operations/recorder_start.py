"""`recorder_start`: write down what this worker's memory is and whether it makes progress, many times a second.

The file outlives the worker, whatever ends it. A recorder that somebody else started goes on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_ext.notes import Notes
from worker_ext.operations.operation import Operation
from worker_ext.payload import NumberField, TextField
from worker_ext.recorder.begin import MAX_RATE, MAX_SECONDS, MIN_RATE, MIN_SECONDS, RATE, SECONDS, begin_recorder
from worker_ext.recorder.recorder import Options
from worker_ext.state import running_recorder

if TYPE_CHECKING:
    from collections.abc import Mapping


def recorder_start(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    started, notes = time.perf_counter(), Notes()
    options = Options(
        Path(arguments["directory"]), arguments["instance"], float(arguments["rate"]), float(arguments["seconds"])
    )
    recorder = running_recorder(worker)
    # One that runs stays, whoever started it and with whatever arguments, unless nobody can find its file any more.
    already = recorder is not None and recorder.ring.is_there()
    if recorder is None or not already:
        recorder = begin_recorder(worker, options, notes)
    return {
        "path": str(recorder.ring.path),
        "instance": recorder.options.instance,
        "bytes": recorder.ring.nbytes,
        "slots": recorder.ring.slots,
        "already": already,
        "other": recorder.options.instance != options.instance,
        "notes": notes.as_list(),
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation(
    "recorder_start",
    {
        "directory": TextField(r"/[^\0]{0,999}", "an absolute path"),
        "instance": TextField("[0-9a-f]{16}", "16 hexadecimal digits, in small letters"),
        "rate": NumberField(default=RATE, minimum=MIN_RATE, maximum=MAX_RATE),
        "seconds": NumberField(default=SECONDS, minimum=MIN_SECONDS, maximum=MAX_SECONDS),
    },
    recorder_start,
)
