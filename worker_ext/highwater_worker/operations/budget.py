"""`budget`: the engine's memory budget, as its start left it in the worker's attributes.

It reads attributes only, and never changes once the engine has started: once in an engine's life is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from highwater_worker.memory.engine_budget import read_engine_budget
from highwater_worker.operations.operation import Operation
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def budget(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the answer's body."""
    start = state_of(worker).start
    return {"engine_budget": read_engine_budget(worker, start), "start": [] if start is None else start.phases}


OPERATION = Operation("budget", {}, budget)
