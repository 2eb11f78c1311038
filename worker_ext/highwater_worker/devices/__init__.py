"""The families of devices that a worker may run on, behind one seam.

To add one: a class that inherits from `DeviceFamily`, a line in `FAMILIES`, and its variable in `_VISIBLE`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from highwater_worker.attributes import first_of, look_up, text, whole
from highwater_worker.devices.accelerator import Cuda, Npu
from highwater_worker.devices.cpu import Cpu
from highwater_worker.devices.family import DeviceFamily
from highwater_worker.errors import Notes, UnreadableError

FAMILIES: tuple[DeviceFamily, ...] = (Npu(), Cuda(), Cpu())
# The variable that each driver, and vLLM for its workers, chooses devices by
# (vllm 0.32.0 platforms/interface.py:311, vllm_ascend 0.18.0 platform.py:100).
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class Device:
    family: DeviceFamily
    index: int | None

    @property
    def type(self) -> str:
        return self.family.type


def device_of(worker: object) -> Device:
    """Return the worker's device, ready for calls from this thread. Raises UnreadableError for an unknown one."""
    return _device(*_label(worker))


def describe_device(worker: object, notes: Notes) -> tuple[Device | None, dict[str, Any]]:
    """Return the worker's device, and its description for a response; unknown values are null.

    Two workers may share one device. `uuid` shows that, or, on one machine, `physical_index`.
    """
    label = notes.attempt("device", lambda: _label(worker))
    device = notes.attempt("device", lambda: _device(*label)) if label else None
    kind, index = label or (None, None)
    return device, {
        "type": kind,
        "index": index,
        "physical_index": _physical_index(kind, index),
        "name": notes.attempt("device.name", lambda: device.family.name(device.index)) if device else None,
        "uuid": notes.attempt("device.uuid", lambda: _uuid(device)) if device else None,
    }


def _physical_index(kind: str | None, index: int | None) -> int | None:
    """Return the device's number as the machine counts, None where it goes by another name there."""
    named = _named(kind, index)
    if named is None:
        return index
    return int(named) if named.isdigit() else None


def _uuid(device: Device) -> str | None:
    named = _named(device.type, device.index)
    # A slice of a GPU is a device of its own, but may report the whole GPU's identity as its own.
    return named if named is not None and named.startswith("MIG-") else device.family.uuid(device.index)


def _named(kind: str | None, index: int | None) -> str | None:
    """Return the device's name in the process's environment, None where it does not choose among devices."""
    visible = os.environ.get(_VISIBLE.get(kind or "", ""))
    if not visible or index is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    return names[index] if index < len(names) else ""


def _device(kind: str | None, index: int | None) -> Device:
    family = next((family for family in FAMILIES if family.type == kind), None)
    if family is None:
        known = ", ".join(family.type for family in FAMILIES)
        raise UnreadableError(f"the worker's device is of type {kind}; known: {known}")
    if index is None and kind != "cpu":
        raise UnreadableError(f"the worker's device is {kind} without an index")
    family.prepare(index)
    return Device(family, index)


def _label(worker: object) -> tuple[str | None, int | None]:
    """Return type and index of the worker's device as it states them itself, without a call to the device."""
    # CPUWorker before vllm 0.23 and NPUWorker of vllm-ascend 0.11 hand the device to their runner and keep none
    # (vllm 0.12.0 v1/worker/cpu_worker.py:114, vllm_ascend 0.11.0 worker/worker_v1.py:216, `init_device`).
    device = first_of(worker, "device", "model_runner.device")
    if device is None:
        return text(look_up(worker, "device_config", "device_type")), None
    return text(look_up(device, "type")), whole(look_up(device, "index"))
