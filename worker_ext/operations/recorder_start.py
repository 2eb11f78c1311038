"""`recorder_start`: record this worker's memory and progress, many times a second.

The file outlives the worker, whatever ends it. It refuses to begin what it could not go on with (the file has its whole
size before the first record, or the old recorder goes on), to end a recorder that another caller started, and to write
where it may have to wait for another machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_ext.encoder_outputs import find_encoder_cache
from worker_ext.errors import RefusedError
from worker_ext.notes import Notes
from worker_ext.operations.hello import EXTENSION_VERSION
from worker_ext.operations.operation import Operation
from worker_ext.payload import number, text
from worker_ext.recorder.bodies import encoded
from worker_ext.recorder.file_system import file_system_of, is_in_memory, is_remote
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
    # A running one stays, for whatever caller and arguments it was started, unless its file cannot be found any more.
    already = recorder is not None and recorder.has_file()
    if recorder is None or not already:
        recorder = _started(worker, options, notes)
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
        "rate": number(1, 100, default=10),
        "seconds": number(10, 3600, default=120),
    },
    recorder_start,
)


def _started(worker: object, options: Options, notes: Notes) -> Recorder:
    state = state_of(worker)
    kind = file_system_of(options.directory)
    if is_remote(kind):
        raise RefusedError(
            f"directory {str(options.directory)!r} lies on {kind}: a server that is gone would hold the engine up; "
            "it must be on this machine, best in memory, such as a folder in /dev/shm"
        )
    has_entries = notes.attempt("encoder_cache", lambda: find_encoder_cache(worker) is not None) is not False
    identity = {
        **file_identity(worker, options.instance, notes),
        "started_at": round(time.time(), 3),
        "rate": options.rate,
        "seconds": options.seconds,
        "extension": EXTENSION_VERSION,
    }
    ring = make_ring(options.path(os.getpid()), encoded(identity), options.layout(has_entries=has_entries))
    try:
        recorder = Recorder(worker, ring, options, in_memory=is_in_memory(kind))
        if state.recorder is not None and not state.recorder.stop():
            notes.add("path", f"the recorder before this one {NOT_ENDED}")
        recorder.start(notes)
    except BaseException:
        ring.discard()
        raise
    state.recorder = recorder
    return recorder
