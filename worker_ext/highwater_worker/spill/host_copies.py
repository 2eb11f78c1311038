"""Copies of tensors between one worker's device and host memory.

Every copy to the host is waited for, and of those to the device all but the ones that the engine's next computation
waits for by itself. torch is imported when the first tensor is copied, never with this module.
"""

from __future__ import annotations

from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

from highwater_worker.encoder_cache.spilling_dict import Spilled, SpilledGroup
from highwater_worker.errors import describe
from highwater_worker.memory.storages import is_tensor, storage_of, view_bytes

if TYPE_CHECKING:
    from highwater_worker.devices import Device
    from highwater_worker.memory.storages import Tensor
    from highwater_worker.notes import Notes


class HostCopies:
    """Makes copies for one worker.

    Args:
        device: The worker's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pins = device.family.pins_host_memory
        self._plain: type | None = None
        self._strided: object = None
        self._under_way: deque[tuple[Tensor, Any]] = deque()
        """Sources of copies that were not waited for, each with the event that comes after the copy."""

    def can_take(self, value: object) -> bool:
        """Return whether a value is one plain tensor on the worker's device: nothing else can come back from a copy."""
        if not is_tensor(value):
            return False
        if self._plain is None:
            torch = import_module("torch")
            self._plain, self._strided = torch.Tensor, torch.strided
        # A subclass (a parameter, a tensor in parts) may hold more than its elements, and so may one that somebody hung
        # attributes on (such as the `modality` of embeddings, vllm 0.32.0 multimodal/utils.py:400). A sparse one has no
        # such elements.
        if type(value) is not self._plain or vars(value) or value.layout is not self._strided:
            return False
        device = value.device
        return bool(device.type == self._device.type) and getattr(device, "index", None) in (None, self._device.index)

    def host_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of the host that the copy of a tensor takes."""
        return self.copy_bytes(view_bytes(tensor))

    def copy_bytes(self, nbytes: int) -> int:
        """Return the bytes of the host that the copy of so many bytes takes."""
        # torch rounds pinned memory up to a power of two (torch 2.13.0 include/ATen/core/CachingHostAllocator.h:305).
        return 1 << (nbytes - 1).bit_length() if self._pins and nbytes else nbytes

    def to_host(self, tensor: Tensor, group: SpilledGroup, notes: Notes) -> Spilled:
        """Copy a tensor into host memory. The caller has waited for the device.

        Args:
            tensor: On the device.
            group: Its group: all entries on the same storage.
            notes: Gets the reason where the copy is not pinned.
        """
        host = self._pinned(tensor, notes) if self._pins else None
        is_pinned = host is not None
        if host is None:
            host = self._copy(tensor, "cpu")
        return Spilled(host, tensor.device, self.host_bytes(tensor), storage_of(tensor).key, group, is_pinned)

    def to_device(self, spilled: Spilled, *, is_waited_for: bool) -> Tensor:
        """Copy a tensor back.

        Args:
            spilled: Its copy.
            is_waited_for: Whether to return only once the copy is done. Else it is only put on the device's current
                stream where its memory allows that (it is pinned): the next computation there comes after it.

        Raises:
            RuntimeError: There is no room.
        """
        if is_waited_for or not spilled.is_pinned:
            return self._copy(spilled.host, spilled.device)
        self._forget_done()
        made = self._copy(spilled.host, spilled.device, non_blocking=True)
        # The source must outlive the copy, as vllm-ascend has it (vllm_ascend 0.27.1rc1 worker/model_runner_v1.py:1089,
        # `_copy_cpu_encoder_cache_to_device`).
        done = getattr(import_module("torch"), self._device.type).Event()
        done.record()
        self._under_way.append((spilled.host, done))
        return made

    def _forget_done(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            self._under_way.popleft()

    def _pinned(self, tensor: Tensor, notes: Notes) -> Tensor | None:
        try:
            return self._copy(tensor, "cpu", pin_memory=True)
        except RuntimeError as error:
            # Containers limit locked memory. Pageable memory does as well, at a fraction of the speed.
            notes.add("host_bytes_added", f"in pageable memory, because pinning failed: {describe(error)}")
            self._pins = False
            return None

    @staticmethod
    def _copy(tensor: Tensor, device: object, *, non_blocking: bool = False, **options: bool) -> Tensor:
        torch = import_module("torch")
        # As the engine makes them. A dense tensor keeps its strides, another becomes contiguous.
        with torch.inference_mode():
            made: Tensor = torch.empty_like(tensor, device=device, **options).copy_(tensor, non_blocking=non_blocking)
        return made
