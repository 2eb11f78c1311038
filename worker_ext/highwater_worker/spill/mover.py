"""Moves encoder outputs between device and host memory, group by group, and keeps the accounts.

Whatever goes wrong in the middle, an entry is whole, on one side or the other. The engine waits meanwhile, so a move
ends between two groups when its time is up, and reports what is left.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from highwater_worker.encoder_cache.spilling_dict import Spilled, SpilledGroup
from highwater_worker.errors import describe
from highwater_worker.memory.storages import view_bytes
from highwater_worker.spill.host_copies import HostCopies

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from highwater_worker.devices import Device
    from highwater_worker.encoder_cache.spilling_dict import SpillingDict
    from highwater_worker.memory.storages import Tensor
    from highwater_worker.notes import Notes
    from highwater_worker.spill.restore_reserve import RestoreReserve
    from highwater_worker.spill.spill_plan import Group


class Mover:
    """Does one operation's moves.

    Args:
        device: The worker's.
        notes: Gets the reasons why entries could not be moved.
        deadline: The end of its time, by `time.perf_counter`; at least one group is moved all the same.
    """

    def __init__(self, device: Device, notes: Notes, deadline: float = math.inf) -> None:
        self._device = device
        self.device_type = device.type
        self.notes = notes
        self._deadline = deadline
        self.copies = HostCopies(device)
        self.entries = 0
        """Entries moved."""
        self.device_bytes = 0
        """Bytes that the device got back, or had to give."""
        self.host_bytes = 0
        """Bytes that the host had to give."""
        self.over_budget = 0
        """Entries that stayed because the host was to give no more."""
        self.failed = 0
        """Entries that stayed because a copy failed."""
        self.remaining_entries = 0
        """Entries that would go next, were the time not up."""
        self.remaining_bytes = 0
        """Bytes that the device would get back for them, or have to give."""
        self.seconds = 0.0

    def spill(
        self,
        cache: SpillingDict,
        groups: Sequence[Group],
        target: int | None,
        budget: int,
        reserve: RestoreReserve | None = None,
    ) -> None:
        """Move groups to the host, in their order, until the device got back the target.

        Args:
            cache: The encoder cache.
            groups: The groups that may go. A group that went holds its tensors no longer.
            target: Bytes of the device; None for all that may go.
            budget: Host bytes that may be used.
            reserve: Its growth for the way back is subtracted from the gain; None where nothing is kept.
        """
        is_waited_for = False
        kept = 0
        for place, group in enumerate(groups):
            if target is not None and self.device_bytes - kept >= target:
                break
            if self.entries and self._is_late():
                self._put_off(groups[place:], None if target is None else target + kept - self.device_bytes)
                break
            host_bytes = sum(map(self.copies.host_bytes, group.tensors.values()))
            if self.host_bytes + host_bytes > budget:
                self.over_budget += len(group.tensors)  # a smaller one may still fit
                continue
            started = time.perf_counter()
            try:
                if not is_waited_for:
                    # A step that is under way on the device may still read the tensors that are about to go.
                    self._device.family.synchronize(self._device.index)
                    is_waited_for = True
                together = SpilledGroup(group.nbytes)
                spilled = {
                    key: self.copies.to_host(tensor, together, self.notes) for key, tensor in group.tensors.items()
                }
            except Exception as error:  # noqa: BLE001 - it costs only this group, which stays; it is noted
                self.notes.add("spilled_entries", f"no more, because a copy failed: {describe(error)}")
                self.failed += len(group.tensors)
                break  # the next would most likely fail too, and the engine waits meanwhile
            finally:
                self.seconds += time.perf_counter() - started
            cache.put_away(spilled)
            group.tensors.clear()  # the device gets the storage back with the last reference
            self.entries += len(spilled)
            self.device_bytes += group.nbytes
            self.host_bytes += sum(value.host_bytes for value in spilled.values())
            if reserve is not None:
                kept = max(kept, reserve.growth(group.nbytes))

    def bring_back(self, cache: SpillingDict, reserve: RestoreReserve) -> None:
        """Move everything back to the device, what was used last first, until there is no more room.

        Args:
            cache: The encoder cache.
            reserve: Kept for urgent ways back; it is used where all that is left fits into it.
        """
        spilled = [(key, value) for key, value in dict.items(cache) if type(value) is Spilled]
        spilled.sort(key=lambda item: -cache.last_use(item[0]))
        left = sum(view_bytes(value.host) for _, value in spilled)
        started = time.perf_counter()
        for place, (key, value) in enumerate(spilled):
            if self.entries and self._is_late():
                self.remaining_entries, self.remaining_bytes = len(spilled) - place, left
                break
            try:
                nbytes = view_bytes(_brought(cache, key, value, reserve, left))
            except Exception as error:  # noqa: BLE001 - the entry stays spilled; it is noted
                self.notes.add("left_entries", describe(error))
                break  # to fill the device to the last byte would take what the next step needs
            self.entries += 1
            self.device_bytes += nbytes
            left -= nbytes
        self.failed = len(spilled) - self.entries
        self.seconds = time.perf_counter() - started

    def _is_late(self) -> bool:
        return time.perf_counter() >= self._deadline

    def _put_off(self, groups: Sequence[Group], wanted: int | None) -> None:
        for group in groups:
            if wanted is not None and self.remaining_bytes >= wanted:
                break
            self.remaining_entries += len(group.tensors)
            self.remaining_bytes += group.nbytes
        if wanted is not None:
            self.remaining_bytes = min(self.remaining_bytes, wanted)


def _brought(cache: SpillingDict, key: Hashable, value: Spilled, reserve: RestoreReserve, left: int) -> Tensor:
    try:
        return cache.bring_back(key, value)
    except RuntimeError:
        if left > reserve.nbytes:
            raise
    reserve.drop()
    return cache.bring_back(key, value)
