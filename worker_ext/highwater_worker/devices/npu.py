"""Ascend NPUs, through torch_npu."""

from __future__ import annotations

from highwater_worker.devices.accelerator import Accelerator, on_main_thread
from highwater_worker.errors import UnreadableError


class Npu(Accelerator):
    """An Ascend NPU."""

    type = "npu"

    def give_back(self, index: int | None) -> str:
        """Return the allocator's cached blocks and the operators' workspace to the driver.

        Raises:
            UnreadableError: Called on another thread than the steps run on. Each device's workspaces have a lock, but
                the map of all devices' workspaces, which this clears, has none
                (torch_npu 2.8.0 csrc/core/npu/NPUWorkspaceAllocator.cpp:412).
        """
        if not on_main_thread():
            raise UnreadableError("torch.npu.empty_cache is unsafe on a thread that is not the worker's main thread")
        return super().give_back(index)
