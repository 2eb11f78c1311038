"""Copies of tensors between one worker's device and host memory.

Every copy is waited for. torch is imported when the first tensor is copied, never with this module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from worker_ext.errors import describe
from worker_ext.spilling_dict import Spilled
from worker_ext.storages import is_tensor, storage_of, view_bytes

if TYPE_CHECKING:
    from worker_ext.devices import Device
    from worker_ext.notes import Notes
    from worker_ext.storages import Tensor


class HostCopies:
    """Makes copies for one worker.

    Args:
        device: The worker's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pins = device.family.pins_host_memory
        self._plain: type | None = None

    def can_take(self, value: object) -> bool:
        """Say whether a value is one plain tensor on the worker's device: what comes back is just that."""
        if not is_tensor(value):
            return False
        if self._plain is None:
            self._plain = import_module("torch").Tensor
        # A subclass (a parameter, a tensor in parts) may hold more than its elements.
        if type(value) is not self._plain:
            return False
        device = value.device
        return bool(device.type == self._device.type) and getattr(device, "index", None) in (None, self._device.index)

    def host_bytes(self, tensor: Tensor) -> int:
        """Return what the copy of a tensor takes of the host."""
        nbytes = view_bytes(tensor)
        # torch rounds pinned memory up to a power of two (ATen/core/CachingHostAllocator.h, `allocate`).
        return 1 << (nbytes - 1).bit_length() if self._pins and nbytes else nbytes

    def to_host(self, tensor: Tensor, notes: Notes) -> Spilled:
        """Copy a tensor into host memory. The caller has waited for the device."""
        host = self._pinned(tensor, notes) if self._pins else None
        if host is None:
            host = self._copy(tensor, "cpu")
        return Spilled(host, tensor.device, self.host_bytes(tensor), storage_of(tensor).key)

    def to_device(self, spilled: Spilled) -> Tensor:
        """Copy a tensor back; with memory that the allocator keeps unused, where the device has none left.

        Raises:
            RuntimeError: There is no room all the same.
        """
        try:
            return self._copy(spilled.host, spilled.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; torch_npu raises it as it is
            failure = error.with_traceback(None)  # whose frames would hold on to what was allocated
        try:
            self._device.family.give_back(self._device.index)
        except Exception:  # noqa: BLE001 - what went wrong first is what the engine should see
            raise failure from None
        return self._copy(spilled.host, spilled.device)

    def _pinned(self, tensor: Tensor, notes: Notes) -> Tensor | None:
        try:
            return self._copy(tensor, "cpu", pin_memory=True)
        except RuntimeError as error:
            # Containers limit locked memory. Pageable memory does as well, at a fraction of the speed.
            notes.add("host_bytes_added", f"in pageable memory, because pinning failed: {describe(error)}")
            self._pins = False
            return None

    @staticmethod
    def _copy(tensor: Tensor, device: object, **options: bool) -> Tensor:
        torch = import_module("torch")
        # As the engine makes them. A dense tensor keeps its strides, another becomes contiguous.
        with torch.inference_mode():
            made: Tensor = torch.empty_like(tensor, device=device, **options).copy_(tensor)
        return made
