"""Decides which encoder outputs go to host memory, by keys and bytes, and how much of it they may fill; moves nothing.

Entries that are views of one storage go together or not at all: the device gets a storage back with its last view.
Ranks that share a model should decide alike, so the decision uses what they have in common: sizes, order, the count of
accesses. Seconds and the host's memory are each rank's own: a rank that decides otherwise is slower, not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from highwater_worker.devices import HostMemory, read_host
from highwater_worker.encoder_cache.spilling_dict import Spilled, SpillingDict
from highwater_worker.engine_view import ranks_on_machine
from highwater_worker.errors import Notes, RefusedError
from highwater_worker.memory.storages import Storage, Tensor, storage_of, tensors_in, view_bytes


class HostBudget(NamedTuple):
    """Bytes of host memory for spilled entries."""

    total: int
    taken: int  # that lie there already

    @property
    def left(self) -> int:
        """The bytes that may still be added; negative where more lie there than is allowed now."""
        return self.total - self.taken

    def __str__(self) -> str:
        return f"the host's budget is {self.total} bytes, of which {self.taken} are taken"


def read_host_budget(
    worker: object, given: int | None, taken: int, notes: Notes, host: HostMemory | None = None
) -> HostBudget:
    """Return one worker's budget: the caller's, or half of what the host could give if nothing were spilled.

    Never more than the host has left for this worker: the kernel ends a process that takes more, and so the engine. The
    engine's other workers on the machine get the same call at the same time.

    `taken` are the bytes that this worker has spilled already. `notes` gets the reason where the budget is less than
    the caller's limit (`given`); without one, and with the host's free memory unknown, this raises RefusedError.
    """
    host = host or read_host(notes)
    if host.free_bytes is None:
        if given is None:
            raise RefusedError("what the host's memory has left cannot be read: give host_budget_bytes")
        return HostBudget(given, taken)
    share = taken + host.free_bytes // ranks_on_machine(worker, notes)
    if given is None:
        return HostBudget(share // 2, taken)
    if given > share:
        notes.add("host_budget_bytes", f"{share} instead of {given}: the host has no more left for this worker")
    return HostBudget(min(given, share), taken)


class Target(NamedTuple):
    """The goal of a trim; at most one of the three is given."""

    free_bytes: int | None
    keep_bytes: int | None
    idle_seconds: float | None

    def asked_bytes(self, device_bytes: int) -> int | None:
        if self.keep_bytes is not None:
            return max(0, device_bytes - self.keep_bytes)
        return self.free_bytes


@dataclass
class Group:
    nbytes: int  # that the device gets back for all of them
    tensors: dict[Any, Tensor] = field(default_factory=dict)
    is_needed: bool = False  # a running request has yet to read one of them
    last_use: int = 0  # of the most recently used entry

    @property
    def is_larger_than_its_storage(self) -> bool:
        """True where its entries overlap: copied one by one, they would come back larger than they went."""
        return sum(map(view_bytes, self.tensors.values())) > self.nbytes


class SpillPlan(NamedTuple):
    groups: list[Group]
    asked_bytes: int | None
    kept_as_needed: int | None
    """Entries that would go, were it not for a running request; None where that is not known."""
    unspillable: int  # entries that cannot go: not one plain tensor on the device, or views that overlap


def make_plan(
    cache: SpillingDict, target: Target, can_take: Callable[[object], bool], needed: set[str] | None, device_type: str
) -> SpillPlan:
    """Decide which groups go, of values that `can_take` says can be copied to the host and back.

    `needed` are the keys that running requests need; None where unknown, and then nothing is held back.
    """
    groups, fixed = _read(cache, can_take, device_type)
    movable = [group for key, group in groups.items() if key not in fixed and not group.is_larger_than_its_storage]
    on_device = sum(type(value) is not Spilled for value in dict.values(cache))
    unspillable = on_device - sum(len(group.tensors) for group in movable)
    storages = {key: group.nbytes for key, group in groups.items()} | fixed
    asked = target.asked_bytes(sum(storages.values()))
    if asked == 0:  # the usual case of a caller that polls: it should cost as little as possible
        return SpillPlan([], asked, 0, unspillable)
    if asked is None and target.idle_seconds:
        movable = [group for group in movable if min(map(cache.idle_seconds, group.tensors)) >= target.idle_seconds]
    for group in movable:
        group.is_needed = any(str(key) in (needed or ()) for key in group.tensors)
        group.last_use = max(map(cache.last_use, group.tensors))
    # Stable: groups not used since the cache is watched keep the order in which they were made.
    movable.sort(key=lambda group: (group.is_needed, group.last_use))
    if asked is not None:
        return SpillPlan(movable, asked, 0, unspillable)
    kept = sum(len(group.tensors) for group in movable if group.is_needed)
    return SpillPlan([group for group in movable if not group.is_needed], None, kept, unspillable)


def _read(
    cache: SpillingDict, can_take: Callable[[object], bool], device_type: str
) -> tuple[dict[tuple[str, int], Group], dict[tuple[str, int], int]]:
    """Return the groups, and the bytes of the storages on the device that something holds which cannot go."""
    groups: dict[tuple[str, int], Group] = {}
    fixed: dict[tuple[str, int], int] = {}
    for key, value in dict.items(cache):
        if type(value) is Spilled:
            continue
        storages = [storage_of(tensor) for tensor in tensors_in(value)]
        if can_take(value) and storages[0].nbytes:
            group = groups.setdefault(storages[0].key, Group(storages[0].nbytes))
            group.tensors[key] = value
        else:
            fixed |= {storage.key: storage.nbytes for storage in storages if storage.device_type == device_type}
    return groups, fixed


# --- how much would go, kept up to date entry by entry ---


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
        staying = {storage for storage in needed if self._can_leave(storage)}
        of_size = dict(self._of_size)
        for storage in staying:
            of_size[storage.nbytes] -= 1
        nbytes = self._bytes - sum(storage.nbytes for storage in staying)
        all_of_it = Movable(nbytes, max((size for size, count in of_size.items() if count), default=0))
        if self._copy_bytes - sum(self._groups[storage].copy_bytes for storage in staying) <= budget:
            return all_of_it, all_of_it
        gone = largest = on_host = 0
        for storage, group in self._groups.items():
            if storage not in staying and self._can_leave(storage) and on_host + group.copy_bytes <= budget:
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
        if group is None or group.fixed or storage.device_type != self._device_type:
            return False
        return group.view_bytes <= storage.nbytes  # where views overlap they would come back larger than they went

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
