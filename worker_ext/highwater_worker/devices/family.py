"""The interface of the families of devices, with the defaults of one that torch keeps no figures of, as a CPU.

Beside a device's memory stands the host's, as the worker's process sees it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from highwater_worker.errors import Notes, UnavailableError, UnreadableError
from highwater_worker.kernel.cgroup import read_cgroup, read_oom_kills
from highwater_worker.kernel.proc import ROOT, lines_of, read_machine, rss_bytes


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
        return min(
            (part for part in (self.cgroup_limit_bytes, self.node_total_bytes) if part is not None), default=None
        )

    @property
    def free_bytes(self) -> int | None:
        parts = [] if self.node_available_bytes is None else [self.node_available_bytes]
        if self.cgroup_limit_bytes is not None and self.cgroup_used_bytes is not None:
            parts.append(max(0, self.cgroup_limit_bytes - self.cgroup_used_bytes))
        return min(parts, default=None)


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
    visible_by = ""
    """The variable that its driver, and vLLM for its workers, chooses devices by (vllm 0.32.0
    platforms/interface.py:311, vllm_ascend 0.18.0 platform.py:100); empty where there is nothing to choose."""
    variables: tuple[str, ...] = ()
    """The variables that change how much of its memory is used or which devices are, none of which holds a secret."""
    is_host_memory = False
    """True where its memory is the machine's: a move to the host gains nothing, and a worker's is its process's."""
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


class Cpu(DeviceFamily):
    """The machine's processors: a worker's device memory is its process's host memory."""

    type = "cpu"
    variables = ("VLLM_CPU_KVCACHE_SPACE",)
    is_host_memory = True

    def name(self, index: int | None) -> str | None:  # noqa: ARG002 - there is one
        return _model_name()

    def space(self, index: int | None, host: HostMemory) -> Space:  # noqa: ARG002 - as above
        return Space(host.total_bytes, host.free_bytes, host.rss_bytes)

    def give_back(self, index: int | None) -> str:  # noqa: ARG002 - as above
        """Return free memory of the C library's allocator to the kernel.

        A preloaded tcmalloc (which vLLM's CPU guide recommends) or jemalloc takes the allocator's place, and
        `malloc_trim` would then trim an empty heap: each is called in its own way. musl and macOS have none of them.
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
