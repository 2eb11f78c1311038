"""The bytes that the device would gain by a `trim` without a target now, computed without moving anything.

It is kept up to date entry by entry, so that a sample need not look at all of them. `trim` decides for
itself: the needs of running requests, and the room on the host, may be different a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

from highwater_worker.devices import Device
from highwater_worker.devices.family import HostMemory
from highwater_worker.encoder_cache.entries import Entry, spilling_cache
from highwater_worker.encoder_cache.spilling_dict import Spilled
from highwater_worker.engine_view import find_encoder_cache, needed_hashes
from highwater_worker.errors import Notes
from highwater_worker.memory.storages import Storage, Tensor, view_bytes
from highwater_worker.spill.mover import HostCopies, RestoreReserve
from highwater_worker.spill.plan import read_host_budget
from highwater_worker.spill.spilling import refuse_trim, restorer_of


class Movability(NamedTuple):
    storages: tuple[Storage, ...]
    can_go: bool  # it can be copied to the host and back
    view_bytes: int
    copy_bytes: int  # of the host, that its copy would take
    spilled_bytes: int  # of the host, that its copy takes already


def movability(entry: Entry, copies: HostCopies) -> Movability:
    # Called for each entry of a cache of thousands: an entry that can be moved is one tensor, measured once.
    storages, value = tuple(entry.storages.values()), entry.value
    if type(value) is Spilled:
        return Movability(storages, False, 0, 0, value.host_bytes)
    if not copies.can_take(value):
        return Movability(storages, False, 0, 0, 0)
    nbytes = view_bytes(cast("Tensor", value))
    return Movability(storages, True, nbytes, copies.copy_bytes(nbytes), 0)


class Movable(NamedTuple):
    nbytes: int
    largest: int


@dataclass
class _SharedStorage:
    """The entries that are views of one storage: they go together or not at all."""

    entries: int = 0
    fixed: int = 0  # the number of those that cannot go
    view_bytes: int = 0
    copy_bytes: int = 0

    def can_leave(self, storage: Storage) -> bool:
        """Return whether all of them may go; where views overlap they would come back larger than they went."""
        return not self.fixed and self.view_bytes <= storage.nbytes


class Groups:
    """A cache's storages, and the totals of all and of those on the device that may go; each storage counts once."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        # Not by the address alone: while an entry that is gone still counts, its address may be in use again, for
        # something of another size.
        self._groups: dict[Storage, _SharedStorage] = {}
        # Of the storages that may go. Kept along, as a cache has thousands of entries and the engine waits.
        self._bytes = self._copy_bytes = 0
        self._of_size: dict[int, int] = {}
        self.device_bytes = self.host_bytes = 0
        self.spilled_bytes = 0  # the bytes of the copies in host memory

    def add(self, entry: Movability) -> None:
        self._count(entry, 1)

    def remove(self, entry: Movability) -> None:
        self._count(entry, -1)

    def without(self, needed: Iterable[Storage], budget: int) -> tuple[Movable, Movable]:
        """Return the storages that may go (not `needed`, still to be read), and those within a host budget in bytes."""
        kept = {storage for storage in needed if self._can_leave(storage)}
        of_size = dict(self._of_size)
        for storage in kept:
            of_size[storage.nbytes] -= 1
        nbytes = self._bytes - sum(storage.nbytes for storage in kept)
        all_of_it = Movable(nbytes, max((size for size, count in of_size.items() if count), default=0))
        if self._copy_bytes - sum(self._groups[storage].copy_bytes for storage in kept) <= budget:
            return all_of_it, all_of_it
        gone = largest = on_host = 0
        for storage, group in self._groups.items():
            if storage not in kept and self._can_leave(storage) and on_host + group.copy_bytes <= budget:
                gone, largest = gone + storage.nbytes, max(largest, storage.nbytes)
                on_host += group.copy_bytes  # one that does not fit stays, and a smaller one may still fit
        return all_of_it, Movable(gone, largest)

    def _count(self, entry: Movability, sign: int) -> None:
        self.spilled_bytes += sign * entry.spilled_bytes
        for storage in entry.storages:
            group = self._groups.get(storage)
            if group is None:
                group = self._groups[storage] = _SharedStorage()
                self._weigh_all(storage, 1)
            self._weigh_movable(storage, group, -1)
            group.entries += sign
            group.fixed += sign * (not entry.can_go)
            group.view_bytes += sign * entry.view_bytes
            group.copy_bytes += sign * entry.copy_bytes
            self._weigh_movable(storage, group, 1)
            if not group.entries:
                del self._groups[storage]
                self._weigh_all(storage, -1)

    def _can_leave(self, storage: Storage) -> bool:
        group = self._groups.get(storage)
        return group is not None and storage.device_type == self._device_type and group.can_leave(storage)

    def _weigh_all(self, storage: Storage, sign: int) -> None:
        if storage.device_type == self._device_type:
            self.device_bytes += sign * storage.nbytes
        else:
            self.host_bytes += sign * storage.nbytes

    def _weigh_movable(self, storage: Storage, group: _SharedStorage, sign: int) -> None:
        if not group.entries or not self._can_leave(storage):
            return
        self._bytes += sign * storage.nbytes
        self._copy_bytes += sign * group.copy_bytes
        self._of_size[storage.nbytes] = self._of_size.get(storage.nbytes, 0) + sign
        if not self._of_size[storage.nbytes]:
            del self._of_size[storage.nbytes]


def trimmable_bytes(
    worker: object, device: Device, groups: Groups, storages_of: Callable[[str], Iterable[Storage]], host: HostMemory
) -> int:
    """Return the bytes that the device would gain, less what would be kept for the way back.

    `storages_of` returns the storages of the entry with a key. Raises RefusedError where a trim would be refused, or it
    is unknown whether it would, and UnreadableError for a cache of an unknown kind.
    """
    if find_encoder_cache(worker) is None:
        return 0
    refuse_trim(worker)
    cache = spilling_cache(worker)
    reserve, allowed = RestoreReserve(device), None
    if cache is not None:
        reserve, allowed = restorer_of(cache).reserve, restorer_of(cache).host_budget_bytes
    budget = read_host_budget(worker, allowed, groups.spilled_bytes, Notes(), host).left
    # Where a runner does not show what is needed, a trim holds nothing back.
    needed = (storage for key in needed_hashes(worker) or () for storage in storages_of(key))
    movable, fitting = groups.without(needed, budget)
    # As `trim` has it: where all that could go is what would be kept, nothing goes.
    if movable.nbytes <= reserve.growth(movable.largest):
        return 0
    return max(0, fitting.nbytes - reserve.growth(fitting.largest))
