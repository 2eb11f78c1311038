"""The families of devices that a worker may run on, behind one seam.

To add one: a class that inherits from `DeviceFamily`, and its place in `FAMILIES`; in the sidecar a row of `DEVICES`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from highwater_worker.devices.accelerator import Cuda, Npu
from highwater_worker.devices.family import AllocatorFigures, Cpu, DeviceFamily, HostMemory, Space
from highwater_worker.engine_view import SUSPENDED, device_label, suspending_backend
from highwater_worker.errors import Notes, UnreadableError

NO_DEVICE = "the worker's device is not known; see the note on device"
FAMILIES: tuple[DeviceFamily, ...] = (Npu(), Cuda(), Cpu())


@dataclass(frozen=True)
class Device:
    family: DeviceFamily
    index: int | None

    @property
    def type(self) -> str:
        return self.family.type

    @property
    def is_host_memory(self) -> bool:
        return self.family.is_host_memory


def is_host_memory(kind: str | None) -> bool:
    """Return whether the memory of a type of device is its machine's; False of an unknown one."""
    return any(family.is_host_memory for family in FAMILIES if family.type == kind)


def device_of(worker: object) -> Device:
    """Return the worker's device, ready for calls from this thread. Raises UnreadableError for an unknown one."""
    return _device(*device_label(worker))


def describe_device(worker: object, notes: Notes) -> tuple[Device | None, dict[str, Any]]:
    """Return the worker's device, and its description for a response; unknown values are null.

    Two workers may share one device. `uuid` shows that, or, on one machine, `physical_index`: the device's number as
    the machine counts, null where it goes by another name there.
    """
    label = notes.attempt("device", lambda: device_label(worker))
    device = notes.attempt("device", lambda: _device(*label)) if label else None
    kind, index = label or (None, None)
    # The device's name in the process's environment; None where that does not choose among devices.
    named: str | None = None
    visible = next((os.environ.get(family.visible_by) for family in FAMILIES if family.type == kind), None)
    if visible and index is not None:
        names = [name.strip() for name in visible.split(",")]
        named = names[index] if index < len(names) else ""
    physical = index if named is None else int(named) if named.isdigit() else None
    # A slice of a GPU is a device of its own, but may report the whole GPU's identity as its own.
    slice_of_gpu = named if named is not None and named.startswith("MIG-") else None
    return device, {
        "type": kind,
        "index": index,
        "physical_index": physical,
        "name": notes.attempt("device.name", lambda: device.family.name(device.index)) if device else None,
        "uuid": notes.attempt("device.uuid", lambda: slice_of_gpu or device.family.uuid(device.index))
        if device
        else None,
    }


def _device(kind: str | None, index: int | None) -> Device:
    family = next((family for family in FAMILIES if family.type == kind), None)
    if family is None:
        known = ", ".join(family.type for family in FAMILIES)
        raise UnreadableError(f"the worker's device is of type {kind}; known: {known}")
    if index is None and not family.is_host_memory:
        raise UnreadableError(f"the worker's device is {kind} without an index")
    family.prepare(index)
    return Device(family, index)


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


def read_allocator(device: Device | None, notes: Notes) -> AllocatorFigures:
    if device is None:
        notes.add("torch", NO_DEVICE)
        return AllocatorFigures()
    return device.family.allocator(device.index, notes)
