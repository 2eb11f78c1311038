"""The parts of one worker's memory, each read on its own: for the response to `memory`, and for the recorder.

A part that cannot be read costs only itself, and is noted by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from highwater_worker.attributes import first_of, fraction, look_up, text, whole
from highwater_worker.devices import Device
from highwater_worker.devices.family import AllocatorFigures, Space
from highwater_worker.devices.host import HostMemory
from highwater_worker.errors import Notes, RefusedError
from highwater_worker.memory.allocator import AllocatorReserve
from highwater_worker.memory.kv_cache import Residency, kv_cache_storages

REQUESTED = ("requested_memory", "requested_cpu_memory")
# vllm-ascend up to 0.13 kept the free bytes alone (vllm_ascend 0.12.0rc1 worker/worker_v1.py:216, vllm_ascend 0.13.0
# worker/worker.py:240, `_init_device`).
INIT_FREE = ("init_snapshot.free_memory", "init_npu_memory")
_ASCEND_TAKES_GIVEN_BYTES = (0, 19)
SUSPENDED = "the engine is suspended by {}: its device is not read until it resumes"
NO_DEVICE = "the worker's device is not known; see the note on device"


class KvCache(NamedTuple):
    """The memory of keys and values in bytes, None where it could not be read."""

    resident_bytes: int | None
    reserved_bytes: int | None


def read_space(worker: object, device: Device | None, host: HostMemory, notes: Notes) -> Space:
    """Return the device's memory as its driver sees it; all unknown where its driver must not be called."""
    unknown = Space(None, None, None)
    suspended_by = suspending_backend(worker)
    if suspended_by is not None:
        notes.add("total_bytes", SUSPENDED.format(suspended_by))
        return unknown
    if device is None:
        notes.add("total_bytes", NO_DEVICE)
        return unknown
    return notes.attempt("total_bytes", lambda: device.family.space(device.index, host)) or unknown


def suspending_backend(worker: object) -> str | None:
    """Return the backend that suspended the engine, None where it is not suspended.

    vLLM's own sleep mode unmaps memory and leaves the device usable. Another backend may checkpoint the whole process's
    state on the device: a call to the driver then waits until the engine resumes, on the very thread that resumes it
    (vllm 0.27.0 device_allocator/sleep_mode_backend.py:109, vllm 0.32.0 device_allocator/sleep_mode_backend.py:116).
    """
    backend = look_up(worker, "_sleep_mode_backend")
    suspended = look_up(backend, "_state") not in (None, "RUNNING")
    name = type(backend).__name__
    return name if suspended and name != "CuMemBackend" else None


def refuse_suspended(worker: object) -> None:
    """Check that the device's driver may be called; `sleep.refuse_while_asleep` checks that memory may be touched.

    Raises RefusedError where a call to its driver might never return.
    """
    suspended_by = suspending_backend(worker)
    if suspended_by is not None:
        raise RefusedError(SUSPENDED.format(suspended_by))


def look_at_segments(worker: object, device: Device | None, reserve: AllocatorReserve) -> None:
    if suspending_backend(worker) is None:
        reserve.look(device)


def read_allocator(device: Device | None, notes: Notes) -> AllocatorFigures:
    if device is None:
        notes.add("torch", NO_DEVICE)
        return AllocatorFigures()
    return device.family.allocator(device.index, notes)


def pinned_bytes(device: Device | None, notes: Notes) -> int | None:
    return notes.attempt("host_memory.pinned_bytes", device.family.pinned_bytes) if device is not None else None


def read_kv_cache(worker: object, kind: str, residency: Residency, notes: Notes) -> KvCache:
    storages = notes.attempt("kv_cache_bytes", lambda: kv_cache_storages(worker, kind))
    if storages is None:
        return KvCache(None, None)
    reserved = sum(storage.nbytes for storage in storages)
    if kind != "cpu":
        return KvCache(reserved, reserved)
    resident = notes.attempt("kv_cache_bytes", lambda: residency.total(storages))
    notes.missing("kv_cache_bytes", resident, "the C library cannot show which pages are resident")
    return KvCache(resident, reserved)


def read_budget(worker: object, notes: Notes) -> dict[str, Any]:
    """Return the memory that the engine was configured to take, and the free memory at its start; constant."""
    cache_config = look_up(worker, "vllm_config", "cache_config")
    reads: dict[str, Callable[[], float | None]] = {
        "gpu_memory_utilization": lambda: fraction(look_up(cache_config, "gpu_memory_utilization")),
        "requested_bytes": lambda: _requested_bytes(worker),
        "init_free_bytes": lambda: init_free_bytes(worker),
    }
    return {name: notes.attempt(f"budget.{name}", read) for name, read in reads.items()}


def given_kv_bytes(worker: object) -> int | None:
    """Return the size of the KV cache that a flag or a startup plan gives; None: none is given, or it has no effect.

    vllm-ascend before 0.19 ignores it: there the share of the device sizes the KV cache all the same (vllm_ascend
    0.18.0 worker/worker.py:339, vllm_ascend 0.23.0 worker/worker.py:540).
    """
    if "vllm_ascend" in sys.modules:
        release = re.match(r"(\d+)\.(\d+)", text(look_up(sys.modules.get("vllm"), "__version__")) or "")
        if release is not None and tuple(map(int, release.groups())) < _ASCEND_TAKES_GIVEN_BYTES:
            return None
    return whole(look_up(worker, "vllm_config", "cache_config", "kv_cache_memory_bytes"))


def _requested_bytes(worker: object) -> int | None:
    # With the KV cache's size given, the utilization has no effect: vLLM computes the number and leaves it unused
    # (vllm 0.32.0 v1/worker/gpu_worker.py:649, vllm 0.32.0 v1/worker/cpu_worker.py:213, `determine_available_memory`).
    if given_kv_bytes(worker) is not None:
        return None
    return cast("int | None", first_of(worker, *REQUESTED, convert=whole))


def init_free_bytes(worker: object) -> int | None:
    return cast("int | None", first_of(worker, *INIT_FREE, convert=whole))
