"""Workers of vLLM's CPU backend: their device memory is their process's host memory."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

from highwater_worker.devices.family import DeviceFamily, Space
from highwater_worker.devices.host import HostMemory
from highwater_worker.files import lines_of


class Cpu(DeviceFamily):
    """The machine's processors. They have no identity: a worker shares its memory with no other."""

    type = "cpu"

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
