"""NPUs, and NVIDIA's and AMD's GPUs (torch calls both cuda): torch gives each the same memory interface.

Functions without a device index are never used: they make a context on device 0. Only `synchronize` waits for the
device, for an operation that moves what its streams may still read. Only `snapshot` and `segments` walk every block:
the first on request, the second once, or seldom (`memory.allocator`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, cast

from highwater_worker.devices.family import AllocatorFigures, DeviceFamily, HostMemory, Space, on_main_thread
from highwater_worker.engine_view import as_int, as_text, look_up
from highwater_worker.errors import Notes, UnavailableError, UnreadableError

# Our names to torch's keys (torch 2.13.0 cuda/memory.py:231, torch_npu 2.8.0 npu/memory.py:170, `memory_stats`).
_KEYS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


class Accelerator(DeviceFamily):
    """A device with torch's caching allocator, reached as `torch.<type>`."""

    pins_host_memory = True

    def prepare(self, index: int | None) -> None:
        """Give a thread that is not the main one its device.

        Without, its first call would make a context on device 0, whatever the index (torch_npu 2.8.0
        csrc/core/npu/NPUFunctions.cpp:74, `GetDevice`). The main thread has the device that the engine chose.
        """
        if not on_main_thread():
            self._module().set_device(index)

    def name(self, index: int | None) -> str | None:
        return str(self._module().get_device_name(index))

    def uuid(self, index: int | None) -> str | None:
        uuid = look_up(device_properties(self._module(), index), "uuid")
        shown = uuid.hex() if isinstance(uuid, bytes) else as_text(uuid)
        # A driver that knows none leaves zeros (torch_npu 2.10.0 csrc/npu/Module.cpp:88): all devices would be one.
        return shown if shown and shown.strip("0-") else None

    def space(self, index: int | None, host: HostMemory) -> Space:  # noqa: ARG002 - the driver's figures suffice
        """Return the whole card's memory: other processes' use is in it too."""
        free, total = self._module().mem_get_info(index)
        return Space(int(total), int(free), int(total) - int(free))

    def allocator(self, index: int | None, notes: Notes) -> AllocatorFigures:
        stats = notes.attempt("torch", lambda: self._module().memory_stats(index))
        if stats is None:
            return AllocatorFigures()
        figures: dict[str, int | None] = {}
        for name, key in _KEYS.items():
            value = figures[name] = as_int(stats.get(key))
            if value is None:
                notes.add(f"torch.{name}", f"torch.{self.type}.memory_stats has no {key}")
            elif value < 0:
                # So vLLM says of sleep mode's allocator (vllm 0.32.0 utils/mem_utils.py:310).
                figures[name], why = 0, "memory was freed past it, as sleep mode does; 0 is shown"
                notes.add(f"torch.{name}", f"torch counts {value}: {why}")
        return AllocatorFigures(**figures)

    def block_count(self, index: int | None) -> int | None:
        """Return an upper bound: the blocks in use, the free ones beside them, and the free ones of a whole segment."""
        stats = self._module().memory_stats(index)
        counts = [as_int(stats.get(f"{name}.all.current")) for name in ("active", "inactive_split", "segment")]
        return None if None in counts else sum(count for count in counts if count is not None)

    def segments(self, index: int | None) -> list[Mapping[str, Any]]:  # noqa: ARG002 - torch shows all devices
        """Return every segment of the allocator, unless the history, which can be huge, would come along.

        Raises UnreadableError: torch has no ``memory_snapshot``, or records the history of its allocations.
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
        return None if stats is None else as_int(stats().get("allocated_bytes.current"))

    def give_back_pinned(self) -> bool:
        empty = self._host_empty_cache()
        if empty is not None:
            empty()
        return empty is not None

    def give_back(self, index: int | None) -> str:  # noqa: ARG002 - empty_cache takes none
        self._module().empty_cache()
        return "empty_cache"

    def synchronize(self, index: int | None) -> None:
        self._module().synchronize(index)

    def snapshot(self, index: int | None) -> dict[str, Any]:
        """Return what `torch.<type>.memory._dump_snapshot` would write.

        Not by that function: it writes through links, and torch_npu's starts its profiler too, into the file's folder
        (torch_npu 2.8.0 npu/memory.py:868). torch shows every device that its process uses, whatever the index. Raises
        UnavailableError where this version of PyTorch cannot take one, UnreadableError where torch returned no
        segments.
        """
        take = look_up(self._module(), "memory", "_snapshot")
        if take is None:
            version = as_text(look_up(import_module("torch"), "__version__"))
            raise UnavailableError(f"torch.{self.type}.memory has no _snapshot in this version of PyTorch ({version})")
        taken = take(index)
        if not isinstance(taken, dict) or not isinstance(taken.get("segments"), list):
            raise UnreadableError(f"torch.{self.type}.memory._snapshot returned no segments")
        return taken

    def history_switch(self) -> Callable[..., object] | None:
        return cast("Callable[..., object] | None", look_up(self._module(), "memory", "_record_memory_history"))

    def records_history(self) -> bool:
        for module in ("torch", "torch_npu"):
            is_enabled = look_up(sys.modules.get(module), "_C", f"_{self.type}_isHistoryEnabled")
            if is_enabled is not None:
                return bool(is_enabled())
        return True

    def _module(self) -> ModuleType:
        # Imported late: torch must not come before the engine has chosen its devices. vllm-ascend imports torch_npu,
        # which makes torch.npu.
        return cast("ModuleType", getattr(import_module("torch"), self.type))

    def _host_empty_cache(self) -> Callable[[], object] | None:
        # torch_npu 2.10.0.post4 npu/memory.py:183; earlier wheels have none.
        return cast("Callable[[], object] | None", look_up(self._module(), "host_empty_cache"))


@lru_cache(maxsize=8)  # they never change, and some drivers are called anew each time
def device_properties(module: ModuleType, index: int | None) -> object:
    return module.get_device_properties(index)


# torch_npu 2.10.0.post4 include/third_party/acl/inc/acl/error_codes/rt_error_codes.h:97.
_LOST = "507010"


class Npu(Accelerator):
    type = "npu"
    visible_by = "ASCEND_RT_VISIBLE_DEVICES"
    variables = (
        *("PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING"),
        *(visible_by, "ASCEND_VISIBLE_DEVICES", "HCCL_BUFFSIZE"),
    )

    def space(self, index: int | None, host: HostMemory) -> Space:
        """Return the whole card's memory. Raises UnreadableError where the device was lost."""
        try:
            return super().space(index, host)
        except RuntimeError as error:
            if _LOST not in str(error):
                raise
            why = "its task scheduler no longer answers, so that its memory is not known; it must be reset"
            raise UnreadableError(f"the NPU was lost ({_LOST}): {why}") from error

    def give_back(self, index: int | None) -> str:
        """Give back the operators' workspace too; raises UnreadableError off the worker's main thread."""
        # Each device's workspaces have a lock, but the map of all devices' workspaces, which this clears, has none
        # (torch_npu 2.8.0 csrc/core/npu/NPUWorkspaceAllocator.cpp:412).
        if not on_main_thread():
            raise UnreadableError("torch.npu.empty_cache is unsafe on a thread that is not the worker's main thread")
        return super().give_back(index)


class Cuda(Accelerator):
    """A GPU under CUDA or ROCm."""

    type = "cuda"
    visible_by = "CUDA_VISIBLE_DEVICES"
    variables = (
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
        *(visible_by, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_BUFFSIZE"),
    )

    def uuid(self, index: int | None) -> str | None:
        """Return the device's identity as nvidia-smi and DCGM write it."""
        uuid = super().uuid(index)
        is_bare = uuid is not None and not _is_rocm() and not uuid.startswith(("GPU-", "MIG-"))
        return f"GPU-{uuid}" if is_bare else uuid

    def space(self, index: int | None, host: HostMemory) -> Space:
        """Return the device's memory; on an integrated GPU the free part is the machine's available memory.

        The driver's figure leaves out file pages that the kernel would drop, and vLLM plans with the machine's too
        (vllm 0.12.0 utils/mem_utils.py:102, vllm 0.32.0 utils/mem_utils.py:151).
        """
        space = super().space(index, host)
        total, available = space.total_bytes, host.node_available_bytes
        if total is None or available is None or _is_rocm():
            return space
        # As vLLM asks, and on NVIDIA's alone (vllm 0.32.0 platforms/cuda.py:698).
        if not look_up(device_properties(self._module(), index), "is_integrated"):
            return space
        free = min(available, total)
        return Space(total, free, total - free)

    def _host_empty_cache(self) -> Callable[[], object] | None:
        # torch 2.13.0 cuda/graphs.py:451.
        return cast("Callable[[], object] | None", look_up(sys.modules.get("torch"), "_C", "_host_emptyCache"))


def _is_rocm() -> bool:
    return look_up(sys.modules.get("torch"), "version", "hip") is not None
