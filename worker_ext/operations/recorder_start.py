"""`recorder_start`: write down what this worker's memory is and whether it moves, many times a second, into a file.

The file outlives the worker, whatever ends it. It refuses to begin what it could not go on with: the file has its whole
size before the first record, or the old recorder goes on.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_ext.notes import Notes
from worker_ext.operations.hello import EXTENSION_VERSION
from worker_ext.operations.operation import Operation
from worker_ext.payload import NumberField, TextField
from worker_ext.recorder.bodies import encoded
from worker_ext.recorder.identity import file_identity
from worker_ext.recorder.recorder import NOT_ENDED, Options, Recorder
from worker_ext.recorder.ring import make_ring
from worker_ext.state import running_recorder, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def recorder_start(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    started, notes = time.perf_counter(), Notes()
    options = Options(
        Path(arguments["directory"]), arguments["instance"], float(arguments["rate"]), float(arguments["seconds"])
    )
    recorder = running_recorder(worker)
    already = recorder is not None and recorder.options == options and recorder.ring.is_there()
    if recorder is None or not already:
        recorder = _started(worker, options, notes)
    return {
        "path": str(recorder.ring.path),
        "bytes": recorder.ring.nbytes,
        "slots": recorder.ring.slots,
        "already": already,
        "notes": notes.as_list(),
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation(
    "recorder_start",
    {
        "directory": TextField(r"/[^\0]{0,999}", "an absolute path"),
        "instance": TextField("[0-9a-f]{16}", "16 hexadecimal digits, in small letters"),
        "rate": NumberField(default=10, minimum=1, maximum=100),
        "seconds": NumberField(default=120, minimum=10, maximum=3600),
    },
    recorder_start,
)


def _started(worker: object, options: Options, notes: Notes) -> Recorder:
    state = state_of(worker)
    identity = {
        **file_identity(worker, options.instance, notes),
        "started_at": round(time.time(), 3),
        "rate": options.rate,
        "seconds": options.seconds,
        "extension": EXTENSION_VERSION,
    }
    ring = make_ring(options.path(os.getpid()), encoded(identity), options.slots)
    try:
        recorder = Recorder(worker, state, ring, options)
        if state.recorder is not None and not state.recorder.stop():
            notes.add("path", f"the recorder before this one {NOT_ENDED}")
        recorder.start(notes)
    except BaseException:
        ring.discard()
        raise
    state.recorder = recorder
    return recorder
