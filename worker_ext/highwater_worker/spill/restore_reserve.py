"""Device memory that is kept for entries to come back into, as long as some lie in host memory.

An entry that cannot come back ends the engine. What the allocator keeps unused may be given away at any moment
(`empty_cache`, `release`, another process); a block that is allocated may not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from highwater_worker.devices import Device


class RestoreReserve:
    """One unused block on the device.

    Args:
        device: The worker's. On a CPU worker nothing is kept: host and device are the same memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._block: Any = None
        self.nbytes = 0
        """Its size."""

    def growth(self, nbytes: int) -> int:
        """Return the bytes of the device that a reserve of that size would take besides those that it has."""
        return 0 if self._device.type == "cpu" else max(0, nbytes - self.nbytes)

    def keep(self, nbytes: int) -> bool:
        """Resize it; where the device has no room for that, it stays as it was.

        Returns:
            Whether it has that size now.
        """
        if self._device.type == "cpu" or nbytes == self.nbytes:
            return True
        before = self.nbytes
        # The old block first where the new one is smaller: it finds its place there.
        if nbytes < before:
            self.drop()
        if self._allocate(nbytes):
            return True
        self.drop()
        return self._allocate(nbytes) or (self._allocate(before) and False)

    def drop(self) -> None:
        """Give it back to the allocator."""
        self._block, self.nbytes = None, 0

    def _allocate(self, nbytes: int) -> bool:
        if nbytes <= 0:
            return True
        torch = import_module("torch")
        try:
            block = torch.empty(nbytes, dtype=torch.uint8, device=f"{self._device.type}:{self._device.index}")
        except RuntimeError:  # torch.OutOfMemoryError is one; the caller says what follows from it
            return False
        self._block, self.nbytes = block, nbytes
        return True
