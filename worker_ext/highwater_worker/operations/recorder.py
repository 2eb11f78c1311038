"""`recorder_start`, `recorder_stop`: record this worker's memory and progress, many times a second, into a file.

The file outlives the worker, whatever ends it. A recorder that another caller started goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater_worker.errors import Notes
from highwater_worker.recorder.begin import begin_recorder, running_recorder
from highwater_worker.state import state_of
from highwater_worker.wire import Options
from highwater_worker.writer import NOT_ENDED


def recorder_start(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    notes = Notes()
    options = Options(
        Path(arguments["directory"]), arguments["instance"], float(arguments["rate"]), float(arguments["seconds"])
    )
    recorder = running_recorder(worker)
    # A running one stays, for whatever caller and arguments it was started, unless its file cannot be found any more.
    already = recorder is not None and recorder.ring.is_there()
    if recorder is None or not already:
        recorder = begin_recorder(worker, options, notes)
    return {
        "path": str(recorder.ring.path),
        "instance": recorder.options.instance,
        "bytes": recorder.ring.layout.nbytes,
        "slots": recorder.ring.layout.slots,
        "already": already,
        "other": recorder.options.instance != options.instance,
        "notes": notes.as_list(),
    }


def recorder_stop(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Stop the recorder of one name. The file stays, for its readers."""
    notes, recorder = Notes(), running_recorder(worker)
    stopped = False
    if recorder is None:
        notes.add("stopped", "no recorder runs")
    elif recorder.options.instance != arguments["instance"]:
        notes.add("stopped", f"the recorder that runs is {recorder.options.instance}: another caller started it")
    else:
        stopped = recorder.stop()
        state_of(worker).recorder = None
        if not stopped:
            notes.add("stopped", f"the recorder {NOT_ENDED}")
    return {"stopped": stopped, "path": str(recorder.ring.path) if recorder else None, "notes": notes.as_list()}
