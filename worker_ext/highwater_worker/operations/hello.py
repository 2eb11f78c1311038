"""`hello`: this worker's identity. `budget`: the engine's memory budget, as its start left it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from highwater_worker.devices import describe_device
from highwater_worker.engine_view import (
    encoder_cache_kind,
    look_up,
    note_odd_absence,
    runner_version,
    text,
    vllm_version,
)
from highwater_worker.errors import Notes
from highwater_worker.memory.allocator import look_at_segments
from highwater_worker.memory.engine_budget import read_engine_budget
from highwater_worker.state import state_of
from highwater_worker.wire import EXTENSION_VERSION


def hello(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the worker's identity, without the list of operations."""
    notes = Notes()
    device, entry = describe_device(worker, notes)
    # The sidecar says hello once an engine is ready: the best time for the first look at the allocator's segments.
    look_at_segments(worker, device, state_of(worker).allocator_reserve)
    runner = look_up(worker, "model_runner")
    return {
        "extension_version": EXTENSION_VERSION,
        "device": entry,
        "worker_class": _class_name(worker),
        "runner_class": None if runner is None else _class_name(runner),
        "runner_version": runner_version(worker),
        "vllm_version": vllm_version(),
        "torch_version": text(look_up(sys.modules.get("torch"), "__version__")),
        "encoder_cache_kind": notes.attempt("encoder_cache_kind", lambda: _encoder_cache_kind(worker, notes)),
        "notes": notes.as_list(),
    }


def _encoder_cache_kind(worker: object, notes: Notes) -> str | None:
    kind = encoder_cache_kind(worker)
    if kind is None:
        note_odd_absence(worker, "encoder_cache_kind", notes)
    return kind


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def budget(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the budget, and the phases of the start. Both are constant once the engine has started."""
    start = state_of(worker).start
    return {"engine_budget": read_engine_budget(worker, start), "start": [] if start is None else start.phases}
