"""`recorder_stop`: end the recorder of one name. The file stays, for its readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from highwater_worker.notes import Notes
from highwater_worker.operations.operation import Operation
from highwater_worker.operations.payload import text
from highwater_worker.recorder.recorder import NOT_ENDED
from highwater_worker.state import running_recorder, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def recorder_stop(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    notes, recorder = Notes(), running_recorder(worker)
    stopped = False
    if recorder is None:
        notes.add("stopped", "no recorder runs")
    elif recorder.instance != arguments["instance"]:
        notes.add("stopped", f"the recorder that runs is {recorder.instance}: somebody else started it")
    else:
        stopped = recorder.stop()
        state_of(worker).recorder = None
        if not stopped:
            notes.add("stopped", f"the recorder {NOT_ENDED}")
    return {"stopped": stopped, "path": str(recorder.path) if recorder else None, "notes": notes.as_list()}


OPERATION = Operation(
    "recorder_stop",
    {"instance": text("[0-9a-f]{16}", "16 hexadecimal digits, in small letters")},
    recorder_stop,
)
