"""`memory`: where this worker's device memory is.

It reads counters and metadata. It refuses to touch tensor data, to wait for the device, or to allocate on it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from worker_ext.attributes import fraction, look_up, whole
from worker_ext.devices import describe_device
from worker_ext.devices.figures import AllocatorFigures, Space
from worker_ext.encoder_outputs import encoder_cache_block
from worker_ext.host import read_host
from worker_ext.kv_cache import kv_cache_storages
from worker_ext.notes import Notes
from worker_ext.operations.operation import Operation
from worker_ext.state import state_of
from worker_ext.weights import weights_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker_ext.devices import Device
    from worker_ext.host import HostMemory
    from worker_ext.state import WorkerState


def memory(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the answer's body."""
    started = time.perf_counter()
    notes, state = Notes(), state_of(worker)
    device, entry = describe_device(worker, notes)
    host = read_host(notes)
    body = {
        "device": entry,
        **_space(device, host, notes),
        "torch": _allocator(device, notes)._asdict(),
        **_components(worker, device, state, notes),
        "budget": _budget(worker, notes),
        "host_memory": host._asdict(),
    }
    return {**body, "notes": notes.as_list(), "elapsed_ms": round((time.perf_counter() - started) * 1000, 3)}


OPERATION = Operation("memory", {}, memory)
_NO_DEVICE = "the worker's device is not known; see the note on device"


def _space(device: Device | None, host: HostMemory, notes: Notes) -> dict[str, int | None]:
    unknown = Space(None, None, None)
    if device is None:
        notes.add("total_bytes", _NO_DEVICE)
        return unknown._asdict()
    space = notes.attempt("total_bytes", lambda: device.family.space(device.index, host)) or unknown
    if space.total_bytes is not None and space.free_bytes is None:
        notes.add("free_bytes", f"torch.{device.type} does not tell what is free")
    return space._asdict()


def _allocator(device: Device | None, notes: Notes) -> AllocatorFigures:
    if device is None:
        notes.add("torch", _NO_DEVICE)
        return AllocatorFigures()
    return device.family.allocator(device.index, notes)


def _components(worker: object, device: Device | None, state: WorkerState, notes: Notes) -> dict[str, Any]:
    names = ("weights_bytes", "kv_cache_bytes", "kv_cache_reserved_bytes", "encoder_cache")
    if device is None:
        for name in names:
            notes.add(name, _NO_DEVICE)
        return dict.fromkeys(names)
    kind = device.type
    weights = notes.attempt("weights_bytes", lambda: weights_bytes(worker, kind, state))
    resident, reserved = _kv_cache(worker, kind, state, notes)
    encoder = notes.attempt("encoder_cache", lambda: encoder_cache_block(worker, kind, state))
    return dict(zip(names, (weights, resident, reserved, encoder), strict=True))


def _kv_cache(worker: object, kind: str, state: WorkerState, notes: Notes) -> tuple[int | None, int | None]:
    storages = notes.attempt("kv_cache_bytes", lambda: kv_cache_storages(worker, kind))
    if storages is None:
        return None, None
    reserved = sum(storage.nbytes for storage in storages)
    if kind != "cpu":
        return reserved, reserved
    resident = notes.attempt("kv_cache_bytes", lambda: state.residency.total(storages))
    return notes.missing("kv_cache_bytes", resident, "the C library cannot tell which pages are resident"), reserved


def _budget(worker: object, notes: Notes) -> dict[str, Any]:
    cache_config = look_up(worker, "vllm_config", "cache_config")
    return {
        "gpu_memory_utilization": notes.attempt(
            "budget.gpu_memory_utilization", lambda: fraction(look_up(cache_config, "gpu_memory_utilization"))
        ),
        "requested_bytes": notes.attempt("budget.requested_bytes", lambda: _requested_bytes(worker, cache_config)),
        "init_free_bytes": notes.attempt("budget.init_free_bytes", lambda: _init_free_bytes(worker)),
    }


def _requested_bytes(worker: object, cache_config: object) -> int | None:
    # With the KV cache's size given, the utilization asks for nothing: vLLM computes the number and leaves it unused
    # (vllm/v1/worker/gpu_worker.py and cpu_worker.py, `determine_available_memory`).
    if look_up(cache_config, "kv_cache_memory_bytes") is not None:
        return None
    names = ("requested_memory", "requested_cpu_memory")
    return next((value for name in names if (value := whole(look_up(worker, name))) is not None), None)


def _init_free_bytes(worker: object) -> int | None:
    # vllm-ascend up to 0.13 kept the free bytes alone (vllm_ascend/worker/worker_v1.py, `_init_device`).
    paths = (("init_snapshot", "free_memory"), ("init_npu_memory",))
    return next((value for path in paths if (value := whole(look_up(worker, *path))) is not None), None)
