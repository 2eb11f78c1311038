"""The interface of the families of devices, with the defaults of a device that torch keeps no figures of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from highwater_worker.devices.host import HostMemory
from highwater_worker.errors import Notes, UnavailableError, UnreadableError


class Space(NamedTuple):
    """A device's memory as its driver sees it, in bytes; None where unknown."""

    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None


class AllocatorFigures(NamedTuple):
    """The figures of torch's caching allocator, None where unknown; the names are those of the response."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


class DeviceFamily:
    """A family of devices.

    `index` is always the worker's own: a call without one makes a context on device 0 in every rank.
    """

    type: str  # as torch calls it
    pins_host_memory = False
    """True where copies from and to host memory gain from pages that are locked in place."""

    def prepare(self, index: int | None) -> None:
        """Prepare the calling thread for calls to this device."""

    def name(self, index: int | None) -> str | None:
        """Return the device's name, such as `Ascend910B3`."""

    def uuid(self, index: int | None) -> str | None:
        """Return the device's unique identity, as the vendor's own tools show it; None where unknown."""

    def space(self, index: int | None, host: HostMemory) -> Space:
        """Return the device's memory, every process's use included."""
        raise NotImplementedError

    def allocator(self, index: int | None, notes: Notes) -> AllocatorFigures:  # noqa: ARG002 - a family's with torch's
        return AllocatorFigures()

    def give_back(self, index: int | None) -> str:
        """Return unused memory of the allocator to the device; returns the mechanism, or `unsupported`."""
        raise NotImplementedError

    def block_count(self, index: int | None) -> int | None:
        """Return an upper bound of the blocks in torch's allocator; None where unknown."""

    def segments(self, index: int | None) -> list[Mapping[str, Any]]:  # noqa: ARG002 - as above
        """Return the allocator's segments; raises UnreadableError without any, or if their history would come along."""
        raise UnreadableError(f"torch keeps no segments of {self.type} memory")

    def pinned_bytes(self) -> int | None:
        """Return the host memory that torch keeps locked in place for this process; None where unknown."""

    def give_back_pinned(self) -> bool:
        """Return unused memory of that kind to the system; False where this torch cannot."""
        return False

    def synchronize(self, index: int | None) -> None:
        """Wait until everything on the device's streams is done."""

    def snapshot(self, index: int | None) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Return every segment and block of torch's allocator, as PyTorch's viewer reads them.

        Raises UnavailableError where there is none, UnreadableError for an unknown form.
        """
        raise UnavailableError(f"PyTorch's memory snapshot is not taken on {self.type}; it is on npu and cuda devices")

    def history_switch(self) -> Callable[..., object] | None:
        """Return the function that turns torch's history of allocations on and off; None without one."""

    def records_history(self) -> bool:
        """Return whether that history is on; True where unknown."""
        return False


def on_main_thread() -> bool:
    """Return whether this is the process's main thread, on which a worker runs its steps."""
    return threading.current_thread() is threading.main_thread()
