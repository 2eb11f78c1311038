"""NVIDIA GPUs; AMD's too, which torch also calls cuda."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from highwater_worker.attributes import look_up
from highwater_worker.devices.accelerator import Accelerator, device_properties
from highwater_worker.devices.figures import Space

if TYPE_CHECKING:
    from collections.abc import Callable

    from highwater_worker.devices.host import HostMemory


class Cuda(Accelerator):
    """A GPU under CUDA or ROCm."""

    type = "cuda"

    def uuid(self, index: int | None) -> str | None:
        """Return the device's identity as nvidia-smi and DCGM write it."""
        found = super().uuid(index)
        is_bare = found is not None and not _is_rocm() and not found.startswith(("GPU-", "MIG-"))
        return f"GPU-{found}" if is_bare else found

    def space(self, index: int | None, host: HostMemory) -> Space:
        """Return the device's memory; on an integrated GPU the free part is what the machine can still give.

        The driver counts there only what nobody has touched, without the file pages that the kernel would drop, and
        vLLM plans with the machine's figure too (vllm 0.12.0 utils/mem_utils.py:102, vllm 0.32.0
        utils/mem_utils.py:151).
        """
        space = super().space(index, host)
        available = host.node_available_bytes
        if available is None or space.total_bytes is None or not self._is_integrated(index):
            return space
        free = min(available, space.total_bytes)
        return Space(space.total_bytes, free, space.total_bytes - free)

    def _is_integrated(self, index: int | None) -> bool:
        # As vLLM does, and on NVIDIA's alone (vllm 0.32.0 platforms/cuda.py:698).
        return not _is_rocm() and bool(look_up(device_properties(self._module(), index), "is_integrated"))

    def _host_empty_cache(self) -> Callable[[], object] | None:
        # torch 2.13.0 cuda/graphs.py:451.
        found: Callable[[], object] | None = look_up(sys.modules.get("torch"), "_C", "_host_emptyCache")
        return found


def _is_rocm() -> bool:
    return look_up(sys.modules.get("torch"), "version", "hip") is not None
