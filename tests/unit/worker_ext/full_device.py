"""A fake torch whose device has a fixed capacity, with an allocator that keeps what is freed until it is emptied."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

from tests.unit.worker_ext.fakes import FakeStorage, FakeTensor, FakeTorch


class DeviceFullError(RuntimeError):
    """torch.OutOfMemoryError."""


class DeviceStorage(FakeStorage):
    """Bytes of the device, for as long as something refers to them."""

    def __init__(self, nbytes: int, device: FullDevice) -> None:
        super().__init__(nbytes)
        device.take(nbytes)
        weakref.finalize(self, device.put_back, nbytes)


class FullDevice(FakeTorch):
    """As `FakeTorch`; copies to the device need room there, of so many bytes."""

    def __init__(self, capacity: int) -> None:
        super().__init__("npu")
        self.capacity = capacity
        self.live = 0  # allocated
        self.cached = 0  # freed, and kept by the allocator
        self.foreign = 0  # somebody else's
        self.copies_to_the_host = 0
        self.device_module.empty_cache = self._empty_cache

    @property
    def free(self) -> int:
        return self.capacity - self.foreign - self.live - self.cached

    def take(self, nbytes: int) -> None:
        if nbytes <= self.cached:
            self.cached -= nbytes
        elif nbytes > self.free + self.cached:
            raise DeviceFullError(f"no {nbytes} bytes: {self.free} are free, {self.cached} are cached")
        elif nbytes > self.free:
            self.cached = 0  # as torch's does before it gives up
        self.live += nbytes

    def put_back(self, nbytes: int) -> None:
        self.live -= nbytes
        self.cached += nbytes

    def _empty_cache(self) -> None:
        self.cached = 0

    def empty_like(self, tensor: FakeTensor, device: Any, pin_memory: bool = False) -> FakeTensor:
        made = super().empty_like(tensor, device, pin_memory)
        if made.device.type == "npu":
            copy = made.copy_
            del made.copy_
            made = self.tensor(*tensor.shape)
            made.copy_ = lambda source, non_blocking: self._copy(source, made, non_blocking)
            del copy
        else:
            self.copies_to_the_host += 1
        return made

    def empty(self, nbytes: int, dtype: str, device: str) -> FakeTensor:
        del dtype, device
        return FakeTensor(0, storage=DeviceStorage(nbytes, self))

    def tensor(self, *shape: int, content: object = None, storage: DeviceStorage | None = None) -> FakeTensor:
        """An encoder output on the device."""
        made = FakeTensor(*shape, storage=storage or DeviceStorage(2 * shape[0], self), content=content)
        made.device = SimpleNamespace(type="npu")
        return made
