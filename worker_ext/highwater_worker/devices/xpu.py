"""Intel GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from highwater_worker.devices.accelerator import Accelerator
from highwater_worker.devices.figures import Space
from highwater_worker.errors import UnavailableError

if TYPE_CHECKING:
    from highwater_worker.devices.host import HostMemory


class Xpu(Accelerator):
    """An Intel GPU."""

    type = "xpu"
    pins_host_memory = False

    def space(self, index: int | None, host: HostMemory) -> Space:
        """Return the device's memory; from a torch that does not report what is free, only the total."""
        module = self._module()
        if hasattr(module, "mem_get_info"):
            return super().space(index, host)
        return Space(int(module.get_device_properties(index).total_memory), None, None)

    def snapshot(self, index: int | None) -> dict[str, Any]:  # noqa: ARG002 - the seam's; there is none
        """Refuse: only the newest versions of torch have one, and none was ever read here.

        Raises:
            UnavailableError: Always.
        """
        raise UnavailableError("PyTorch's memory snapshot is not taken on xpu; it is on npu and cuda devices")

    def history_switch(self) -> None:
        """Return None: none was ever read here."""

    def records_history(self) -> bool:
        """Return False."""
        return False
