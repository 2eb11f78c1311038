"""The devices that a worker may run on, a class for each family, and the host's memory as the worker's process sees it.

To add a family: a class that inherits from `Device`, and its place in `FAMILIES`; in the sidecar a row of `DEVICES`.
Until its vLLM's rules for memory are in `kvplan`, what runs on it is watched, and not planned.

torch gives NPUs, NVIDIA's and AMD's GPUs (it calls both cuda) the same memory interface. Functions without a device
index are never used: they make a context on device 0. Only `synchronize` waits for the device, for an operation that
moves what its streams may still read. Only `snapshot` and `segments` walk every block: the first on request, the second
once, or seldom (`memory.allocator`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from highwater_worker.engine_view import SUSPENDED, as_int, as_text, device_label, look_up, suspending_backend
from highwater_worker.errors import Notes, UnavailableError, UnreadableError
from highwater_worker.kernel.cgroup import read_cgroup, read_oom_kills
from highwater_worker.kernel.proc import ROOT, lines_of, read_machine, rss_bytes

NO_DEVICE = "the worker's device is not known; see the note on device"
# Our names to torch's keys (torch 2.13.0 cuda/memory.py:231, torch_npu 2.8.0 npu/memory.py:170, `memory_stats`).
ALLOCATOR_KEYS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
_LOST = "507010"  # torch_npu 2.10.0.post4 include/third_party/acl/inc/acl/error_codes/rt_error_codes.h:97


class HostMemory(NamedTuple):
    """Host memory in bytes (kills: a count), None where it could not be read; the names are those of the response."""

    rss_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    node_total_bytes: int | None = None
    node_available_bytes: int | None = None
    cgroup_oom_kills: int | None = None  # processes of its container that the kernel has killed for memory

    @property
    def total_bytes(self) -> int | None:
        parts = self.cgroup_limit_bytes, self.node_total_bytes
        return min((part for part in parts if part is not None), default=None)

    @property
    def free_bytes(self) -> int | None:
        limit, used = self.cgroup_limit_bytes, self.cgroup_used_bytes
        left = None if limit is None or used is None else max(0, limit - used)
        return min((part for part in (left, self.node_available_bytes) if part is not None), default=None)


def read_host(notes: Notes, root: Path = ROOT) -> HostMemory:
    """Read host memory; what cannot be read is None and noted. No container limit is None without a note."""
    machine = notes.attempt("host_memory.node_total_bytes", lambda: read_machine(root)) or {}
    if machine and "available_bytes" not in machine:
        notes.add("host_memory.node_available_bytes", "/proc/meminfo has no MemAvailable")
    cgroup = notes.attempt("host_memory.cgroup_used_bytes", lambda: read_cgroup(root))
    return HostMemory(
        rss_bytes=notes.attempt("host_memory.rss_bytes", lambda: rss_bytes(root)),
        cgroup_used_bytes=cgroup.used_bytes if cgroup else None,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        node_total_bytes=machine.get("total_bytes"),
        node_available_bytes=machine.get("available_bytes"),
        cgroup_oom_kills=notes.attempt("host_memory.cgroup_oom_kills", lambda: read_oom_kills(root)),
    )


class Space(NamedTuple):
    """A device's memory as its driver sees it, in bytes; None where unknown."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None


class AllocatorFigures(NamedTuple):
    """The figures of torch's caching allocator, None where unknown; the names are those of the response."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


def on_main_thread() -> bool:
    """Return whether this is the process's main thread, on which a worker runs its steps."""
    return threading.current_thread() is threading.main_thread()


class Device:
    """One worker's device, with the defaults of a family that torch keeps no figures of, as a CPU."""

    type: str  # as torch calls it
    visible_by = ""
    """The variable that its driver, and vLLM for its workers, chooses devices by (vllm 0.32.0
    platforms/interface.py:311, vllm_ascend 0.18.0 platform.py:100); empty where there is nothing to choose."""
    variables: tuple[str, ...] = ()
    """The variables that change how much of its memory is used or which devices are, none of which holds a secret."""
    is_host_memory = False
    """True where its memory is the machine's: a move to the host gains nothing, and a worker's is its process's."""
    pins_host_memory = False
    """True where copies from and to host memory gain from pages that are locked in place."""

    def __init__(self, index: int | None) -> None:
        self.index = index

    def prepare(self) -> None:
        """Make the calling thread ready for calls to it."""

    def name(self) -> str | None:
        """Such as `Ascend910B3`."""

    def uuid(self) -> str | None:
        """Return the device's unique identity, as the vendor's own tools show it; None where unknown."""

    def space(self, host: HostMemory) -> Space:
        """Return the device's memory, every process's use included."""
        raise NotImplementedError

    def allocator(self, notes: Notes) -> AllocatorFigures:  # noqa: ARG002 - a family's with torch's
        return AllocatorFigures()

    def give_back(self) -> str:
        """Return the allocator's unused memory to the device, and the mechanism's name, or `unsupported`."""
        raise NotImplementedError

    def block_count(self) -> int | None:
        """Return an upper bound of the blocks in torch's allocator; None where unknown."""

    def segments(self) -> list[Mapping[str, Any]]:
        """Return the allocator's segments; raises UnreadableError: none, or their history, huge, would come along."""
        raise UnreadableError(f"torch keeps no segments of {self.type} memory")

    def pinned_bytes(self) -> int | None:
        """Return the host memory that torch keeps locked in place for this process; None where unknown."""

    def give_back_pinned(self) -> None:
        """Return unused memory of that kind to the system, where this torch can."""

    def synchronize(self) -> None:
        """Wait until everything on the device's streams is done."""

    def snapshot(self) -> dict[str, Any]:
        """Return every segment and block of torch's allocator, as PyTorch's viewer reads them.

        Raises UnavailableError where there is none, UnreadableError for an unknown form.
        """
        raise UnavailableError(f"PyTorch's memory snapshot is not taken on {self.type}; it is on npu and cuda devices")

    def history_switch(self) -> Callable[..., object] | None:
        """Return the function that turns torch's history of allocations on and off; None without one."""

    def records_history(self) -> bool:
        """Return whether that history is on; True where unknown."""
        return False


class Accelerator(Device):
    """A device with torch's caching allocator, reached as `torch.<type>`."""

    pins_host_memory = True

    def prepare(self) -> None:
        # Without, another thread's first call would make a context on device 0, whatever the index (torch_npu 2.8.0
        # csrc/core/npu/NPUFunctions.cpp:74, `GetDevice`). The main thread has the device that the engine chose.
        if not on_main_thread():
            self._module().set_device(self.index)

    def name(self) -> str | None:
        return str(self._module().get_device_name(self.index))

    def uuid(self) -> str | None:
        uuid = look_up(device_properties(self._module(), self.index), "uuid")
        shown = uuid.hex() if isinstance(uuid, bytes) else as_text(uuid)
        # A driver that knows none leaves zeros (torch_npu 2.10.0 csrc/npu/Module.cpp:88): all devices would be one.
        return shown if shown and shown.strip("0-") else None

    def space(self, host: HostMemory) -> Space:  # noqa: ARG002 - the driver's figures suffice
        free, total = self._module().mem_get_info(self.index)
        return Space(int(total), int(free), int(total) - int(free))

    def allocator(self, notes: Notes) -> AllocatorFigures:
        stats = notes.attempt("torch", lambda: self._module().memory_stats(self.index))
        if stats is None:
            return AllocatorFigures()
        figures: dict[str, int | None] = {}
        for name, key in ALLOCATOR_KEYS.items():
            value = figures[name] = as_int(stats.get(key))
            if value is None:
                notes.add(f"torch.{name}", f"torch.{self.type}.memory_stats has no {key}")
            elif value < 0:
                # So vLLM says of sleep mode's allocator (vllm 0.32.0 utils/mem_utils.py:310).
                figures[name], why = 0, "memory was freed past it, as sleep mode does; 0 is shown"
                notes.add(f"torch.{name}", f"torch counts {value}: {why}")
        return AllocatorFigures(**figures)

    def block_count(self) -> int | None:
        stats = self._module().memory_stats(self.index)
        # In use, free beside those, and at most one free one a segment.
        counts = [as_int(stats.get(f"{name}.all.current")) for name in ("active", "inactive_split", "segment")]
        return None if None in counts else sum(count for count in counts if count is not None)

    def segments(self) -> list[Mapping[str, Any]]:
        take = look_up(self._module(), "memory_snapshot")
        if take is None:
            raise UnreadableError(f"torch.{self.type} has no memory_snapshot; the first release will show it")
        if "include_traces" in signature(take).parameters:  # torch 2.13.0 cuda/memory.py:625
            return list(take(include_traces=False))
        if self.records_history():
            why = "too much to walk; the first release will show it"
            raise UnreadableError(f"torch records the history of its allocations, {why}")
        return list(take())

    def pinned_bytes(self) -> int | None:
        # torch 2.13.0 cuda/memory.py:399, torch_npu 2.10.0.post4 npu/memory.py:191.
        stats = look_up(self._module(), "host_memory_stats")
        return None if stats is None else as_int(stats().get("allocated_bytes.current"))

    def give_back_pinned(self) -> None:
        if (empty := self._host_empty_cache()) is not None:
            empty()

    def give_back(self) -> str:
        self._module().empty_cache()
        return "empty_cache"

    def synchronize(self) -> None:
        self._module().synchronize(self.index)

    def snapshot(self) -> dict[str, Any]:
        """Return what `torch.<type>.memory._dump_snapshot` would write.

        Not by that function: it writes through links, and torch_npu's starts its profiler too, into the file's folder
        (torch_npu 2.8.0 npu/memory.py:868). torch shows every device that its process uses, whatever the index.
        """
        take = look_up(self._module(), "memory", "_snapshot")
        if take is None:
            version = as_text(look_up(import_module("torch"), "__version__"))
            raise UnavailableError(f"torch.{self.type}.memory has no _snapshot in this version of PyTorch ({version})")
        taken = take(self.index)
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


@functools.lru_cache(maxsize=8)  # they never change, and some drivers are called anew each time
def device_properties(module: ModuleType, index: int | None) -> object:
    return module.get_device_properties(index)


class Npu(Accelerator):
    type = "npu"
    visible_by = "ASCEND_RT_VISIBLE_DEVICES"
    variables = (
        *("PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING"),
        *(visible_by, "ASCEND_VISIBLE_DEVICES", "HCCL_BUFFSIZE"),
    )

    def space(self, host: HostMemory) -> Space:
        try:
            return super().space(host)
        except RuntimeError as error:
            if _LOST not in str(error):
                raise
            why = "its task scheduler no longer answers, so that its memory is not known; it must be reset"
            raise UnreadableError(f"the NPU was lost ({_LOST}): {why}") from error

    def give_back(self) -> str:
        """Give back the operators' workspace too; raises UnreadableError off the worker's main thread."""
        # Each device's workspaces have a lock, but the map of all devices' workspaces, which this clears, has none
        # (torch_npu 2.8.0 csrc/core/npu/NPUWorkspaceAllocator.cpp:412).
        if not on_main_thread():
            raise UnreadableError("torch.npu.empty_cache is unsafe on a thread that is not the worker's main thread")
        return super().give_back()


class Cuda(Accelerator):
    type = "cuda"  # ROCm's too
    visible_by = "CUDA_VISIBLE_DEVICES"
    variables = (
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
        *(visible_by, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_BUFFSIZE"),
    )

    def uuid(self) -> str | None:
        """Return the device's identity as nvidia-smi and DCGM write it."""
        uuid = super().uuid()
        is_bare = uuid is not None and not _is_rocm() and not uuid.startswith(("GPU-", "MIG-"))
        return f"GPU-{uuid}" if is_bare else uuid

    def space(self, host: HostMemory) -> Space:
        """Return the device's memory; on an integrated GPU the free part is the machine's available memory.

        The driver's figure leaves out file pages that the kernel would drop, and vLLM plans with the machine's too
        (vllm 0.12.0 utils/mem_utils.py:102, vllm 0.32.0 utils/mem_utils.py:151).
        """
        space = super().space(host)
        total, available = space.total_bytes, host.node_available_bytes
        if total is None or available is None or _is_rocm():
            return space
        # As vLLM asks, and on NVIDIA's alone (vllm 0.32.0 platforms/cuda.py:698).
        if not look_up(device_properties(self._module(), self.index), "is_integrated"):
            return space
        free = min(available, total)
        return Space(total, free, total - free)

    def _host_empty_cache(self) -> Callable[[], object] | None:
        # torch 2.13.0 cuda/graphs.py:451.
        return cast("Callable[[], object] | None", look_up(sys.modules.get("torch"), "_C", "_host_emptyCache"))


def _is_rocm() -> bool:
    return look_up(sys.modules.get("torch"), "version", "hip") is not None


class Cpu(Device):
    type = "cpu"
    variables = ("VLLM_CPU_KVCACHE_SPACE",)
    is_host_memory = True

    def name(self) -> str | None:
        return _model_name()

    def space(self, host: HostMemory) -> Space:
        return Space(host.total_bytes, host.free_bytes, host.rss_bytes)

    def give_back(self) -> str:
        """Return free memory of the C library's allocator to the kernel.

        A preloaded tcmalloc (vLLM's CPU guide recommends it) or jemalloc takes the allocator's place, whose heap
        `malloc_trim` would not know. musl and macOS have none of them.
        """
        library = ctypes.CDLL(None)  # what this process's own calls of malloc and free resolve to
        if hasattr(library, "MallocExtension_ReleaseFreeMemory"):
            library.MallocExtension_ReleaseFreeMemory()
            return "tcmalloc"
        if hasattr(library, "mallctl"):
            # 4096 is MALLCTL_ARENAS_ALL (jemalloc/jemalloc_macros.h).
            library.mallctl(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))
            return "jemalloc"
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(ctypes.c_size_t(0))
            return "malloc_trim"
        return "unsupported"


@functools.lru_cache(maxsize=1)
def _model_name() -> str | None:
    lines = lines_of(Path("/proc/cpuinfo"))
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.machine() or None


FAMILIES: tuple[type[Device], ...] = (Npu, Cuda, Cpu)


def is_host_memory(kind: str | None) -> bool:
    """Return whether the memory of a type of device is its machine's; False of an unknown one."""
    return any(family.is_host_memory for family in FAMILIES if family.type == kind)


def device_of(worker: object) -> Device:
    """Return the worker's device, ready for calls from this thread. Raises UnreadableError for an unknown one."""
    kind, index = device_label(worker)
    family = next((family for family in FAMILIES if family.type == kind), None)
    if family is None:
        known = ", ".join(one.type for one in FAMILIES)
        raise UnreadableError(f"the worker's device is of type {kind}; known: {known}")
    if index is None and not family.is_host_memory:
        raise UnreadableError(f"the worker's device is {kind} without an index")
    device = family(index)
    device.prepare()
    return device


def describe_device(worker: object, notes: Notes) -> tuple[Device | None, dict[str, Any]]:
    """Return the worker's device, and its description for a response; unknown values are null.

    Two workers may share one device. `uuid` shows that, or, on one machine, `physical_index`: the device's number as
    the machine counts, null where it goes by another name there.
    """
    label = notes.attempt("device", lambda: device_label(worker))
    device = notes.attempt("device", lambda: device_of(worker)) if label else None
    kind, index = label or (None, None)
    # The device's name in the process's environment; None where that does not choose among devices.
    named: str | None = None
    visible = next((os.environ.get(family.visible_by) for family in FAMILIES if family.type == kind), None)
    if visible and index is not None:
        named = dict(enumerate(map(str.strip, visible.split(",")))).get(index, "")
    physical = index if named is None else int(named) if named.isdigit() else None
    # A slice of a GPU is a device of its own, but may report the whole GPU's identity as its own.
    slice_of_gpu = named if (named or "").startswith("MIG-") else None
    return device, {
        "type": kind,
        "index": index,
        "physical_index": physical,
        "name": notes.attempt("device.name", device.name) if device else None,
        "uuid": notes.attempt("device.uuid", lambda: slice_of_gpu or device.uuid()) if device else None,
    }


def read_space(worker: object, device: Device | None, host: HostMemory, notes: Notes) -> Space:
    """Return the device's memory as its driver sees it; all unknown where its driver must not be called."""
    suspended_by = suspending_backend(worker)
    if suspended_by is not None or device is None:
        notes.add("total_bytes", NO_DEVICE if suspended_by is None else SUSPENDED.format(suspended_by))
        return Space()
    return notes.attempt("total_bytes", lambda: device.space(host)) or Space()


def read_allocator(device: Device | None, notes: Notes) -> AllocatorFigures:
    if device is None:
        notes.add("torch", NO_DEVICE)
        return AllocatorFigures()
    return device.allocator(notes)
