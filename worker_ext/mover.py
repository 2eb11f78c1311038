"""Moves encoder outputs between device and host memory, group by group, and keeps the accounts.

Whatever goes wrong in the middle, an entry is either here or there, whole.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from worker_ext.errors import describe
from worker_ext.host_copies import HostCopies
from worker_ext.spilling_dict import Spilled
from worker_ext.storages import view_bytes

if TYPE_CHECKING:
    from worker_ext.devices import Device
    from worker_ext.notes import Notes
    from worker_ext.spill_plan import Group
    from worker_ext.spilling_dict import SpillingDict


class Mover:
    """Does one operation's moves.

    Args:
        device: The worker's.
        notes: Gets what could not be moved.
    """

    def __init__(self, device: Device, notes: Notes) -> None:
        self._device = device
        self.device_type = device.type
        self._notes = notes
        self.copies = HostCopies(device)
        self.entries = 0
        """Entries moved."""
        self.device_bytes = 0
        """What the device got back, or had to give."""
        self.host_bytes = 0
        """What the host had to give."""
        self.over_budget = 0
        """Entries that stayed because the host was to give no more."""
        self.failed = 0
        """Entries that stayed because a copy failed."""
        self.seconds = 0.0

    def spill(self, cache: SpillingDict, groups: list[Group], asked: int | None, budget: int) -> None:
        """Move groups to the host, in their order, until the device got back what was asked for.

        Args:
            cache: The encoder cache.
            groups: What may go.
            asked: Bytes of the device; None for all that may go.
            budget: Bytes that the host gives at most.
        """
        is_waited_for = False
        for group in groups:
            if asked is not None and self.device_bytes >= asked:
                break
            host_bytes = sum(map(self.copies.host_bytes, group.tensors.values()))
            if self.host_bytes + host_bytes > budget:
                self.over_budget += len(group.tensors)  # a smaller one may still fit
                continue
            started = time.perf_counter()
            try:
                if not is_waited_for:
                    # A step that is under way on the device may still read what we are about to let go.
                    self._device.family.synchronize(self._device.index)
                    is_waited_for = True
                spilled = {key: self.copies.to_host(tensor, self._notes) for key, tensor in group.tensors.items()}
            except Exception as error:  # noqa: BLE001 - it costs only this group, which stays; it is noted
                self._notes.add("spilled_entries", f"no more, because a copy failed: {describe(error)}")
                self.failed += len(group.tensors)
                break  # the next would most likely fail too, and the engine stands still meanwhile
            finally:
                self.seconds += time.perf_counter() - started
            cache.put_away(spilled)
            self.entries += len(spilled)
            self.device_bytes += group.nbytes
            self.host_bytes += sum(value.host_bytes for value in spilled.values())

    def bring_back(self, cache: SpillingDict) -> None:
        """Move everything back to the device, what was used last first, until there is no more room."""
        spilled = [(key, value) for key, value in dict.items(cache) if type(value) is Spilled]
        started = time.perf_counter()
        for key, value in sorted(spilled, key=lambda item: -cache.last_use(item[0])):
            try:
                self.device_bytes += view_bytes(cache.bring_back(key, value))
            except Exception as error:  # noqa: BLE001 - the entry stays spilled; it is noted
                self._notes.add("left_entries", describe(error))
                break  # to fill the device to the last byte would take what the next step needs
            self.entries += 1
        self.failed = len(spilled) - self.entries
        self.seconds = time.perf_counter() - started
