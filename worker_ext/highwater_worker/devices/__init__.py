"""The families of devices that a worker may run on, behind one seam.

To add one: a file with a class that has the methods of `DeviceFamily`, and a line in `FAMILIES`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from highwater_worker.attributes import look_up, text, whole
from highwater_worker.devices.cpu import Cpu
from highwater_worker.devices.cuda import Cuda
from highwater_worker.devices.npu import Npu
from highwater_worker.devices.xpu import Xpu
from highwater_worker.errors import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from highwater_worker.devices.figures import AllocatorFigures, Space
    from highwater_worker.devices.host import HostMemory
    from highwater_worker.notes import Notes


class DeviceFamily(Protocol):
    """The interface of a family of devices.

    `index` is always the worker's own: a call without one makes a context on device 0 in every rank.
    """

    type: str
    pins_host_memory: bool
    """True where copies from and to host memory gain from pages that are locked in place."""

    def prepare(self, index: int | None) -> None:
        """Prepare the calling thread for calls to this device."""

    def name(self, index: int | None) -> str | None:
        """Return the device's name, such as `Ascend910B3`."""

    def uuid(self, index: int | None) -> str | None:
        """Return the device's unique identity, as the vendor's own tools show it; None where it is unknown."""

    def space(self, index: int | None, host: HostMemory) -> Space:
        """Return the device's memory as its driver sees it, everybody's use included."""

    def allocator(self, index: int | None, notes: Notes) -> AllocatorFigures:
        """Return the figures of torch's caching allocator, None where there is none or it does not report them."""

    def give_back(self, index: int | None) -> str:
        """Return unused memory of the allocator to the device; returns what was used for that, or `unsupported`."""

    def block_count(self, index: int | None) -> int | None:
        """Return how many blocks torch's allocator keeps, at most; None where that is unknown."""

    def segments(self, index: int | None) -> list[Mapping[str, Any]]:
        """Return every segment of torch's allocator, without the history of allocations.

        Raises:
            UnreadableError: The family has none.
        """

    def pinned_bytes(self) -> int | None:
        """Return the host memory that torch keeps locked in place for this process; None where it is unknown."""

    def give_back_pinned(self) -> bool:
        """Return unused memory of that kind to the system; False where this torch has no way to."""

    def synchronize(self, index: int | None) -> None:
        """Wait until everything that was put on the device's streams is done."""

    def snapshot(self, index: int | None) -> dict[str, Any]:
        """Return every segment and block of torch's allocator, as PyTorch's viewer reads them.

        Raises:
            UnavailableError: The family has none.
        """

    def history_switch(self) -> Callable[..., object] | None:
        """Return what turns torch's history of allocations on and off; None where there is none."""

    def records_history(self) -> bool:
        """Return whether that history is on; True where it is unknown."""


FAMILIES: tuple[DeviceFamily, ...] = (
    Npu(),
    Cuda(),
    Xpu(),
    Cpu(),
)


# The variable that each driver, and vLLM for its workers, chooses devices by
# (vllm 0.32.0 platforms/interface.py:311, vllm_ascend 0.18.0 platform.py:100).
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass(frozen=True)
class Device:
    """One worker's device."""

    family: DeviceFamily
    index: int | None

    @property
    def type(self) -> str:
        """The device's type in torch's words."""
        return self.family.type


def device_of(worker: object) -> Device:
    """Return the worker's device, ready for calls from this thread.

    Raises:
        UnreadableError: The worker does not show its device, or it is of an unknown family.
    """
    return _device(*_label(worker))


def describe_device(worker: object, notes: Notes) -> tuple[Device | None, dict[str, Any]]:
    """Return the worker's device, and its description for an answer; unknown values are null.

    Two workers may share one device. `uuid` shows that; where there is none, `physical_index` does on one machine.
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
    paths = (("device",), ("model_runner", "device"))
    device = next((found for path in paths if (found := look_up(worker, *path)) is not None), None)
    if device is None:
        return text(look_up(worker, "device_config", "device_type")), None
    return text(look_up(device, "type")), whole(look_up(device, "index"))
