"""The common part of npu, cuda and xpu: torch gives each the same memory interface under its own name.

Never used: functions without a device index (they make a context on device 0). Only `synchronize` waits for the device,
for an operation that moves what its streams may still read. Only `snapshot` and `segments` walk every block: the first
on request, the second once in a worker's life.
"""

from __future__ import annotations

import sys
import threading
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from highwater_worker.attributes import look_up, text, whole
from highwater_worker.devices.figures import AllocatorFigures, Space
from highwater_worker.errors import UnavailableError, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from highwater_worker.devices.host import HostMemory
    from highwater_worker.notes import Notes

# Our names to torch's keys (torch 2.13.0 cuda/memory.py:231, torch_npu 2.8.0 npu/memory.py:170, `memory_stats`).
_KEYS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


class Accelerator:
    """A device with torch's caching allocator, reached as `torch.<type>`."""

    type: str
    pins_host_memory = True

    def prepare(self, index: int | None) -> None:
        """Give a thread that is not the main one its device.

        The main thread of a worker process has it: `init_device` ran there. Any other begins without, and the first
        call on it would make a context on device 0, whatever index it was given (torch_npu 2.8.0
        csrc/core/npu/NPUFunctions.cpp:74, `GetDevice`). On the main thread nothing is set: what the engine chose there
        is the engine's.
        """
        if not on_main_thread():
            self._module().set_device(index)

    def name(self, index: int | None) -> str | None:
        """Return the device's name as its driver reports it."""
        return str(self._module().get_device_name(index))

    def uuid(self, index: int | None) -> str | None:
        """Return the device's own identity as torch reports it; None where this torch, or the driver, has none."""
        uuid = look_up(device_properties(self._module(), index), "uuid")
        found = uuid.hex() if isinstance(uuid, bytes) else text(uuid)
        # A driver that knows none leaves zeros (torch_npu 2.10.0 csrc/npu/Module.cpp:88), and
        # by those all devices would be one.
        return found if found and found.strip("0-") else None

    def space(self, index: int | None, host: HostMemory) -> Space:  # noqa: ARG002 - the seam's; the driver knows it all
        """Return the whole card's memory: other processes' use is in it too."""
        free, total = self._module().mem_get_info(index)
        return Space(int(total), int(free), int(total) - int(free))

    def allocator(self, index: int | None, notes: Notes) -> AllocatorFigures:
        """Return this process's figures on the device."""
        stats = notes.attempt("torch", lambda: self._module().memory_stats(index))
        if stats is None:
            return AllocatorFigures()
        return AllocatorFigures(**{name: self._figure(stats, name, notes) for name in _KEYS})

    def block_count(self, index: int | None) -> int | None:
        """Return an upper bound: the blocks in use, the free ones beside them, and the free ones of a whole segment."""
        stats = self._module().memory_stats(index)
        counts = [whole(stats.get(f"{name}.all.current")) for name in ("active", "inactive_split", "segment")]
        return None if None in counts else sum(count for count in counts if count is not None)

    def segments(self, index: int | None) -> list[Mapping[str, Any]]:  # noqa: ARG002 - torch shows all devices
        """Return every segment of the allocator.

        Raises:
            UnreadableError: This torch has none, or would bring the history of allocations, which can be huge, along.
        """
        take = look_up(self._module(), "memory_snapshot")
        if take is None:
            raise UnreadableError(f"torch.{self.type} has no memory_snapshot; the first release will show it")
        if "include_traces" in signature(take).parameters:  # torch 2.13.0 cuda/memory.py:625
            taken = take(include_traces=False)
        elif self.records_history():
            raise UnreadableError(
                "torch records the history of its allocations, too much to walk; the first release will show it"
            )
        else:
            taken = take()
        return list(taken)

    def pinned_bytes(self) -> int | None:
        """Return what torch's allocator for pinned memory owns, in use or not."""
        # torch 2.13.0 cuda/memory.py:399, torch_npu 2.10.0.post4 npu/memory.py:191.
        stats = look_up(self._module(), "host_memory_stats")
        return None if stats is None else whole(stats().get("allocated_bytes.current"))

    def give_back_pinned(self) -> bool:
        """Return the unused part of it to the system."""
        empty = self._host_empty_cache()
        if empty is not None:
            empty()
        return empty is not None

    def give_back(self, index: int | None) -> str:  # noqa: ARG002 - the seam's; empty_cache takes none
        """Return the allocator's cached blocks to the driver."""
        self._module().empty_cache()
        return "empty_cache"

    def synchronize(self, index: int | None) -> None:
        """Wait for all of the device's streams."""
        self._module().synchronize(index)

    def snapshot(self, index: int | None) -> dict[str, Any]:
        """Return what `torch.<type>.memory._dump_snapshot` would write.

        Not by that function: it writes through links, and torch_npu's starts its profiler too, into the file's folder
        (torch_npu 2.8.0 npu/memory.py:868). The index is the worker's, though torch shows every device that its
        process uses.

        Raises:
            UnavailableError: This version of torch has none; older ones of torch_npu do not.
            UnreadableError: It is of an unknown form.
        """
        take = look_up(self._module(), "memory", "_snapshot")
        if take is None:
            version = text(look_up(import_module("torch"), "__version__"))
            raise UnavailableError(f"torch.{self.type}.memory has no _snapshot in this version of PyTorch ({version})")
        taken = take(index)
        if not isinstance(taken, dict) or not isinstance(taken.get("segments"), list):
            raise UnreadableError(f"torch.{self.type}.memory._snapshot returned no segments")
        return taken

    def history_switch(self) -> Callable[..., object] | None:
        """Return `torch.<type>.memory._record_memory_history`; None where this torch has none."""
        found: Callable[..., object] | None = look_up(self._module(), "memory", "_record_memory_history")
        return found

    def records_history(self) -> bool:
        """Return whether torch records the history of allocations; True where that is unknown."""
        for module in ("torch", "torch_npu"):
            is_enabled = look_up(sys.modules.get(module), "_C", f"_{self.type}_isHistoryEnabled")
            if is_enabled is not None:
                return bool(is_enabled())
        return True

    def _module(self) -> ModuleType:
        # Imported late: with us, torch would come before the engine has chosen its devices. torch.npu is there once
        # torch_npu has been imported, which vllm-ascend does.
        return cast("ModuleType", getattr(import_module("torch"), self.type))

    def _host_empty_cache(self) -> Callable[[], object] | None:
        # torch_npu 2.10.0.post4 npu/memory.py:183; earlier wheels have none.
        found: Callable[[], object] | None = look_up(self._module(), "host_empty_cache")
        return found

    def _figure(self, stats: Mapping[str, object], name: str, notes: Notes) -> int | None:
        value = whole(stats.get(_KEYS[name]))
        if value is None:
            notes.add(f"torch.{name}", f"torch.{self.type}.memory_stats has no {_KEYS[name]}")
        elif value < 0:
            # vLLM says so of sleep mode's allocator (vllm 0.32.0 utils/mem_utils.py:310): torch's own counters then
            # miss the other half.
            notes.add(
                f"torch.{name}", f"torch counts {value}: memory was freed past it, as sleep mode does; 0 is shown"
            )
            return 0
        return value


@lru_cache(maxsize=8)  # they never change, and some drivers are called anew each time
def device_properties(module: ModuleType, index: int | None) -> object:
    """Return torch's properties of a device."""
    return module.get_device_properties(index)


def on_main_thread() -> bool:
    """Return whether this is the process's main thread, where an engine's worker runs its steps."""
    return threading.current_thread() is threading.main_thread()
