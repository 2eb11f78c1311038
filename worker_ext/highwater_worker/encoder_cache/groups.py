"""Which storages may go to host memory: one that entries share goes with all of them, or not at all.

The device gets a storage back with its last view. The totals are kept up to date entry by entry, as a cache has
thousands of them and the engine waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from highwater_worker.memory.storages import Storage


class Movability(NamedTuple):
    storages: tuple[Storage, ...]
    can_go: bool  # it can be copied to the host and back
    view_bytes: int
    copy_bytes: int  # of the host, that its copy would take
    spilled_bytes: int  # of the host, that its copy takes already


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
        staying = {storage for storage in needed if self.can_leave(storage)}
        of_size = dict(self._of_size)
        for storage in staying:
            of_size[storage.nbytes] -= 1
        nbytes = self._bytes - sum(storage.nbytes for storage in staying)
        all_of_it = Movable(nbytes, max((size for size, count in of_size.items() if count), default=0))
        if self._copy_bytes - sum(self._groups[storage].copy_bytes for storage in staying) <= budget:
            return all_of_it, all_of_it
        gone = largest = on_host = 0
        for storage, group in self._groups.items():
            if storage not in staying and self.can_leave(storage) and on_host + group.copy_bytes <= budget:
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

    def can_leave(self, storage: Storage) -> bool:
        group = self._groups.get(storage)
        if group is None or group.fixed or storage.device_type != self._device_type:
            return False
        return group.view_bytes <= storage.nbytes  # where views overlap they would come back larger than they went

    def _weigh_all(self, storage: Storage, sign: int) -> None:
        if storage.device_type == self._device_type:
            self.device_bytes += sign * storage.nbytes
        else:
            self.host_bytes += sign * storage.nbytes

    def _weigh_movable(self, storage: Storage, group: _SharedStorage, sign: int) -> None:
        if not group.entries or not self.can_leave(storage):
            return
        self._bytes += sign * storage.nbytes
        self._copy_bytes += sign * group.copy_bytes
        self._of_size[storage.nbytes] = self._of_size.get(storage.nbytes, 0) + sign
        if not self._of_size[storage.nbytes]:
            del self._of_size[storage.nbytes]
