"""`recorder_start`: record this worker's memory and progress, many times a second.

The file outlives the worker, whatever ends it. A recorder that another caller started goes on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from highwater_worker.notes import Notes
from highwater_worker.operations.operation import Operation
from highwater_worker.operations.payload import number, text
from highwater_worker.recorder.begin import MAX_RATE, MAX_SECONDS, MIN_RATE, MIN_SECONDS, RATE, SECONDS, begin_recorder
from highwater_worker.recorder.recorder import Options
from highwater_worker.state import running_recorder

if TYPE_CHECKING:
    from collections.abc import Mapping


def recorder_start(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    started, notes = time.perf_counter(), Notes()
    options = Options(
        Path(arguments["directory"]), arguments["instance"], float(arguments["rate"]), float(arguments["seconds"])
    )
    recorder = running_recorder(worker)
    # A running one stays, for whatever caller and arguments it was started, unless its file cannot be found any more.
    already = recorder is not None and recorder.has_file()
    if recorder is None or not already:
        recorder = begin_recorder(worker, options, notes)
    return {
        "path": str(recorder.path),
        "instance": recorder.instance,
        "bytes": recorder.nbytes,
        "slots": recorder.slots,
        "already": already,
        "other": recorder.instance != options.instance,
        "notes": notes.as_list(),
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation(
    "recorder_start",
    {
        "directory": text(r"/[^\0]{0,999}", "an absolute path"),
        "instance": text("[0-9a-f]{16}", "16 hexadecimal digits, in small letters"),
        "rate": number(MIN_RATE, MAX_RATE, default=RATE),
        "seconds": number(MIN_SECONDS, MAX_SECONDS, default=SECONDS),
    },
    recorder_start,
)
