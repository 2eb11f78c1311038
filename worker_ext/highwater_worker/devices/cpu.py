"""Workers of vLLM's CPU backend: their device memory is their process's host memory."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from highwater_worker.devices.figures import AllocatorFigures, Space
from highwater_worker.errors import UnavailableError, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from highwater_worker.devices.host import HostMemory
    from highwater_worker.notes import Notes


class Cpu:
    """The machine's processors."""

    type = "cpu"
    pins_host_memory = False

    def prepare(self, index: int | None) -> None:
        """Do nothing: every thread may read it."""

    def name(self, index: int | None) -> str | None:  # noqa: ARG002 - the seam's; there is one
        """Return the processor's model, or its architecture where the machine does not show it."""
        return _model_name()

    def uuid(self, index: int | None) -> str | None:  # noqa: ARG002 - the seam's; there is one
        """Return None: what a worker uses is its own process's memory, which it shares with no other."""
        return None

    def space(self, index: int | None, host: HostMemory) -> Space:  # noqa: ARG002 - the seam's; there is one
        """Return the memory that the process may have in all, could still get, and has."""
        return Space(host.total_bytes, host.free_bytes, host.rss_bytes)

    def allocator(self, index: int | None, notes: Notes) -> AllocatorFigures:  # noqa: ARG002 - torch counts nothing here
        """Return no figures: torch keeps none for host memory."""
        return AllocatorFigures()

    def block_count(self, index: int | None) -> int | None:  # noqa: ARG002 - the seam's; torch keeps none here
        """Return None: torch caches no blocks of host memory."""
        return None

    def segments(self, index: int | None) -> list[Mapping[str, Any]]:  # noqa: ARG002 - the seam's; there are none
        """Refuse.

        Raises:
            UnreadableError: Always.
        """
        raise UnreadableError("torch keeps no segments of host memory")

    def pinned_bytes(self) -> int | None:
        """Return None: nothing is pinned for a device that is the host."""
        return None

    def give_back_pinned(self) -> bool:
        """Do nothing."""
        return False

    def give_back(self, index: int | None) -> str:  # noqa: ARG002 - the seam's; there is one
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

    def synchronize(self, index: int | None) -> None:
        """Do nothing: an operation on the processor is done when it returns."""

    def snapshot(self, index: int | None) -> dict[str, Any]:  # noqa: ARG002 - the seam's; there is none
        """Refuse.

        Raises:
            UnavailableError: Always.
        """
        raise UnavailableError("PyTorch keeps no memory snapshot on cpu; it keeps one of npu and cuda devices")

    def history_switch(self) -> None:
        """Return None: there is no history."""

    def records_history(self) -> bool:
        """Return False."""
        return False


@functools.lru_cache(maxsize=1)
def _model_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.machine() or None
