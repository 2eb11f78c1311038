"""The head of the state that the processes with a simulated device share: its size, and faults on demand (device.h)."""

from __future__ import annotations

import struct
from pathlib import Path

VARIABLE = "CANN_SIMULATED"
"""Names the state's file in a process that has the device."""
_HEAD = ("total_bytes", "devices", "refused_from_bytes", "copy_bytes_per_second", "is_lost")
_PROCESSES_AND_DEVICES = 64 * 4


def new_state(path: Path, **values: int) -> None:
    """Make a device that nobody uses; arguments as for `set_state`."""
    path.write_bytes(bytes(8 * (len(_HEAD) + _PROCESSES_AND_DEVICES)))
    set_state(path, **values)


def set_state(path: Path, **values: int) -> None:
    """Change figures while processes use the device.

    Args:
        path: The state's file.
        values: `total_bytes` of each device, the number of `devices`, and faults, each gone with 0:
            `refused_from_bytes` (so large an allocation fails as on a full device), `copy_bytes_per_second` (between
            host and device), `is_lost` (every call fails that needs the device).
    """
    with path.open("r+b") as file:
        for name, value in values.items():
            file.seek(8 * _HEAD.index(name))
            file.write(struct.pack("=Q", value))
