"""`recorder_stop`: end the flight recorder. The file stays, for whoever reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worker_ext.notes import Notes
from worker_ext.operations.operation import Operation
from worker_ext.recorder.recorder import NOT_ENDED
from worker_ext.state import running_recorder, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def recorder_stop(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the answer's body."""
    notes, recorder = Notes(), running_recorder(worker)
    stopped = False
    if recorder is None:
        notes.add("stopped", "no recorder runs")
    else:
        stopped = recorder.stop()
        state_of(worker).recorder = None
        if not stopped:
            notes.add("stopped", f"the recorder {NOT_ENDED}")
    return {"stopped": stopped, "path": str(recorder.ring.path) if recorder else None, "notes": notes.as_list()}


OPERATION = Operation("recorder_stop", {}, recorder_stop)
