"""Decides which encoder outputs go to host memory, and moves them: group by group, and keeps the accounts.

Entries that are views of one storage go together or not at all: the device gets a storage back with its last view.
Ranks that share a model should decide alike, so the decision uses what they have in common: sizes, order, the count of
accesses. Seconds and the host's memory are each rank's own: a rank that decides otherwise is slower, not wrong.

Whatever goes wrong in the middle, an entry is whole, on one side or the other. The engine waits meanwhile, so a move
ends between two groups when its time is up, and reports what is left. torch is imported when the first tensor is
copied, never with this module.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from highwater_worker.devices import Device, HostMemory, read_host
from highwater_worker.encoder_cache.spilling_dict import Entry, Spilled, SpilledGroup, SpillingDict
from highwater_worker.engine_view import needed_hashes, ranks_on_machine
from highwater_worker.errors import Notes, RefusedError, describe
from highwater_worker.memory.storages import Storage, Tensor, is_tensor, storage_of, tensors_in, view_bytes


class Movability(NamedTuple):
    storages: tuple[Storage, ...]
    can_go: bool  # it can be copied to the host and back
    view_bytes: int
    copy_bytes: int  # of the host, that its copy would take
    spilled_bytes: int  # of the host, that its copy takes already


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

    free_bytes: int | None = None
    keep_bytes: int | None = None
    idle_seconds: float | None = None

    def asked_bytes(self, device_bytes: int) -> int | None:
        if self.keep_bytes is not None:
            return max(0, device_bytes - self.keep_bytes)
        return self.free_bytes


@dataclass
class Group:
    nbytes: int  # that the device gets back for all of them
    tensors: dict[Any, Tensor]
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


# --- the moves ---


class HostCopies:
    """Copies tensors between one worker's device and host memory.

    Every copy to the host is waited for, and of those to the device all but the ones that the engine's next computation
    waits for by itself.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pins = device.pins_host_memory
        self._plain: type | None = None
        self._strided: object = None
        self._under_way: deque[tuple[Tensor, Any]] = deque()
        """Sources of copies that were not waited for, each with the event that comes after the copy."""

    def can_take(self, value: object) -> bool:
        """Return whether a value is one plain tensor on the worker's device: nothing else can come back from a copy."""
        if not is_tensor(value):
            return False
        if self._plain is None:
            torch = import_module("torch")
            self._plain, self._strided = torch.Tensor, torch.strided
        # A subclass (a parameter, a tensor in parts) may hold more than its elements, and so may a tensor that has
        # attributes (such as the `modality` of embeddings, vllm 0.32.0 multimodal/utils.py:400). A sparse one has no
        # such elements.
        tensor: Tensor = value
        if type(value) is not self._plain or vars(value) or tensor.layout is not self._strided:
            return False
        device = tensor.device
        return bool(device.type == self._device.type) and getattr(device, "index", None) in (None, self._device.index)

    def movability(self, entry: Entry) -> Movability:
        # Called for each entry of a cache of thousands: an entry that can be moved is one tensor, measured once.
        storages, value = tuple(entry.storages.values()), entry.value
        if type(value) is Spilled:
            return Movability(storages, False, 0, 0, value.host_bytes)
        if not self.can_take(value):
            return Movability(storages, False, 0, 0, 0)
        nbytes = view_bytes(value)
        return Movability(storages, True, nbytes, self.copy_bytes(nbytes), 0)

    def host_bytes(self, tensor: Tensor) -> int:
        return self.copy_bytes(view_bytes(tensor))

    def copy_bytes(self, nbytes: int) -> int:
        # torch rounds pinned memory up to a power of two (torch 2.13.0 include/ATen/core/CachingHostAllocator.h:305).
        return 1 << (nbytes - 1).bit_length() if self._pins and nbytes else nbytes

    def to_host(self, tensor: Tensor, group: SpilledGroup, notes: Notes) -> Spilled:
        """Copy a tensor into host memory. The caller has waited for the device."""
        host: Tensor | None = None
        if self._pins:
            try:
                host = self._copy(tensor, "cpu", pin_memory=True)
            except RuntimeError as error:
                # Containers limit locked memory. Pageable memory does as well, at a fraction of the speed.
                notes.add("host_bytes_added", f"in pageable memory, because pinning failed: {describe(error)}")
                self._pins = False
        is_pinned = host is not None
        if host is None:
            host = self._copy(tensor, "cpu")
        return Spilled(host, tensor.device, self.host_bytes(tensor), storage_of(tensor).key, group, is_pinned)

    def to_device(self, spilled: Spilled, *, is_waited_for: bool) -> Tensor:
        """Copy a tensor back, or raise a RuntimeError where there is no room.

        A copy that is not waited for is put on the device's current stream, where its memory is pinned: the next
        computation there comes after it.
        """
        if is_waited_for or not spilled.is_pinned:
            return self._copy(spilled.host, spilled.device)
        while self._under_way and self._under_way[0][1].query():
            self._under_way.popleft()
        made = self._copy(spilled.host, spilled.device, non_blocking=True)
        # The source must outlive the copy, as vllm-ascend has it (vllm_ascend 0.27.1rc1 worker/model_runner_v1.py:1089,
        # `_copy_cpu_encoder_cache_to_device`).
        done = getattr(import_module("torch"), self._device.type).Event()
        done.record()
        self._under_way.append((spilled.host, done))
        return made

    @staticmethod
    def _copy(tensor: Tensor, device: object, *, non_blocking: bool = False, **options: bool) -> Tensor:
        torch = import_module("torch")
        # As the engine makes them. A dense tensor keeps its strides, another becomes contiguous.
        with torch.inference_mode():
            made: Tensor = torch.empty_like(tensor, device=device, **options).copy_(tensor, non_blocking=non_blocking)
        return made


class RestoreReserve:
    """One unused block on the device, kept for entries to come back into as long as some lie in host memory.

    What the allocator keeps unused may be given away at any moment (`empty_cache`, `release`, another process); an
    allocated block may not. On a CPU worker nothing is kept: host and device are the same memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._block: Any = None
        self.nbytes = 0

    def growth(self, nbytes: int) -> int:
        return 0 if self._device.is_host_memory else max(0, nbytes - self.nbytes)

    def resize(self, nbytes: int) -> bool:
        """Return True; where the device has no room for that, it stays as it was."""
        if self._device.is_host_memory or nbytes == self.nbytes:
            return True
        before = self.nbytes
        # The old block first where the new one is smaller: it finds its place there.
        if nbytes < before:
            self.drop()
        if self._allocate(nbytes):
            return True
        self.drop()
        return self._allocate(nbytes) or (self._allocate(before) and False)

    def drop(self) -> None:
        self._block, self.nbytes = None, 0

    def _allocate(self, nbytes: int) -> bool:
        if nbytes <= 0:
            return True
        torch = import_module("torch")
        try:
            block = torch.empty(nbytes, dtype=torch.uint8, device=f"{self._device.type}:{self._device.index}")
        except RuntimeError:  # torch.OutOfMemoryError is one; the caller says what follows from it
            return False
        self._block, self.nbytes = block, nbytes
        return True


class Mover:
    """Does one operation's moves, until a deadline by `time.perf_counter`; at least one group is moved all the same."""

    def __init__(self, device: Device, notes: Notes, deadline: float = math.inf) -> None:
        self._device = device
        self.notes = notes
        self._deadline = deadline
        self._copies = HostCopies(device)
        self.entries = self.device_bytes = self.host_bytes = 0
        """Entries moved, the bytes of the device for them, and those that the host had to give."""
        self.over_budget = 0  # entries that stayed because the host was to give no more
        self.failed = 0  # entries that stayed because a copy failed
        self.remaining_entries = self.remaining_bytes = 0
        self.seconds = 0.0

    def left(self) -> dict[str, Any]:
        return {
            "complete": self.remaining_entries == 0,
            "remaining_entries": self.remaining_entries,
            "remaining_bytes": self.remaining_bytes,
        }

    def plan(self, worker: object, cache: SpillingDict, target: Target) -> SpillPlan:
        """Decide which groups go, of what can be copied to the host and back.

        Where the runner does not show what running requests need, nothing is held back. That is no danger: an entry
        that is needed after all comes back, later by a copy.
        """
        needed = needed_hashes(worker)
        # By a walk of its own and not by `Groups`, which count what comes and goes: that takes three times as long.
        groups: dict[tuple[str, int], Group] = {}
        fixed: dict[tuple[str, int], int] = {}  # the storages on the device that something holds which cannot go
        on_device = 0
        for key, value in dict.items(cache):
            if type(value) is Spilled:
                continue
            on_device += 1
            storages = [storage_of(tensor) for tensor in tensors_in(value)]
            if self._copies.can_take(value) and storages[0].nbytes:
                group = groups.setdefault(storages[0].key, Group(storages[0].nbytes, {}))
                group.tensors[key] = value
            else:
                fixed |= {one.key: one.nbytes for one in storages if one.device_type == self._device.type}
        movable = [group for key, group in groups.items() if key not in fixed and not group.is_larger_than_its_storage]
        unspillable = on_device - sum(len(group.tensors) for group in movable)
        asked = target.asked_bytes(sum(({key: group.nbytes for key, group in groups.items()} | fixed).values()))
        none_kept = None if needed is None else 0
        if asked == 0:  # the usual case of a caller that polls: it should cost as little as possible
            return SpillPlan([], asked, none_kept, unspillable)
        if asked is None and target.idle_seconds:
            movable = [group for group in movable if min(map(cache.idle_seconds, group.tensors)) >= target.idle_seconds]
        for group in movable:
            group.is_needed = any(str(key) in (needed or ()) for key in group.tensors)
            group.last_use = max(map(cache.last_use, group.tensors))
        # Stable: groups not used since the cache is watched keep the order in which they were made.
        movable.sort(key=lambda group: (group.is_needed, group.last_use))
        if asked is not None:
            return SpillPlan(movable, asked, none_kept, unspillable)
        kept = none_kept if needed is None else sum(len(group.tensors) for group in movable if group.is_needed)
        return SpillPlan([group for group in movable if not group.is_needed], None, kept, unspillable)

    def spill(
        self,
        cache: SpillingDict,
        groups: Sequence[Group],
        target: int | None,
        budget: int,
        reserve: RestoreReserve | None = None,
    ) -> None:
        """Move groups to the host, in order, until the device got back the target.

        A group that went holds its tensors no longer. `target` are bytes of the device (None: all that may go),
        `budget` those of the host; the growth of `reserve`, for the way back, is subtracted from the gain.
        """
        is_waited_for = False
        reserved = 0  # for the way back
        for place, group in enumerate(groups):
            if target is not None and self.device_bytes - reserved >= target:
                break
            if self.entries and self._is_late():
                self._put_off(groups[place:], None if target is None else target + reserved - self.device_bytes)
                break
            host_bytes = sum(map(self._copies.host_bytes, group.tensors.values()))
            if self.host_bytes + host_bytes > budget:
                self.over_budget += len(group.tensors)  # a smaller one may still fit
                continue
            started = time.perf_counter()
            try:
                if not is_waited_for:
                    # A step that is under way on the device may still read the tensors that are about to go.
                    self._device.synchronize()
                    is_waited_for = True
                together = SpilledGroup(group.nbytes)
                spilled = {
                    key: self._copies.to_host(tensor, together, self.notes) for key, tensor in group.tensors.items()
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
                reserved = max(reserved, reserve.growth(group.nbytes))

    def bring_back(self, cache: SpillingDict, reserve: RestoreReserve) -> None:
        """Move everything back to the device, what was used last first, until there is no more room.

        The reserve is kept for urgent ways back; it is used where all that is left fits into it.
        """
        spilled = sorted(cache.spilled().items(), key=lambda item: -cache.last_use(item[0]))
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
