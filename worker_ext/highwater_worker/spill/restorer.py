"""Brings a spilled entry back to its device, and makes room for it there.

An access that fails ends the engine, so every harmless way is tried first, in this order: the allocator's unused
blocks go back to the device; idle entries go to host memory, least recently used first; the reserve is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from highwater_worker.devices import Device
from highwater_worker.encoder_cache.encoder_outputs import needed_hashes
from highwater_worker.encoder_cache.spilling_dict import Spilled, SpillingDict
from highwater_worker.errors import Notes, RefusedError
from highwater_worker.memory.allocator import AllocatorReserve
from highwater_worker.memory.storages import Tensor, view_bytes
from highwater_worker.spill.mover import HostCopies, Mover, RestoreReserve
from highwater_worker.spill.plan import Target, make_plan, read_host_budget

_NO_TARGET = Target(free_bytes=None, keep_bytes=None, idle_seconds=None)


class Restorer:
    """Brings one cache's entries back; the worker is not kept alive."""

    def __init__(self, worker: object, device: Device, allocator_reserve: AllocatorReserve) -> None:
        self._worker = weakref.ref(worker)
        self._device = device
        self._allocator_reserve = allocator_reserve
        self._copies = HostCopies(device)
        self.reserve = RestoreReserve(device)
        self.host_budget_bytes: int | None = None
        """The limit that the last caller of `trim` gave; entries that make room for others keep to it."""

    @property
    def reserve_bytes(self) -> int:
        return self.reserve.nbytes

    def bring(self, cache: SpillingDict, spilled: Spilled, *, is_urgent: bool) -> Tensor:
        """Return an entry on its device, or raise a RuntimeError where there is still no room.

        An urgent one is needed by the engine now: the copy is not waited for (the engine's next computation comes after
        it on the same stream), and others make room. Else only the allocator's unused blocks do.
        """
        try:
            return self._copies.to_device(spilled, is_waited_for=not is_urgent)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; torch_npu raises it as it is
            failure = error.with_traceback(None)  # whose frames would hold on to what was allocated
        had, freed = self.reserve.nbytes, 0
        tensor: Tensor | None = None
        for make_room in self._ways(cache, spilled) if is_urgent else [self._empty_cache]:
            try:
                made = make_room()
                if made is None:
                    continue
                freed += made
                tensor = self._copies.to_device(spilled, is_waited_for=not is_urgent)
            except Exception:  # noqa: BLE001, S112 - the next way is tried; the engine gets the failure that began it
                continue
            break
        if is_urgent:
            # What is left of the reserve and of the room that others made stays kept: foreign allocations may have
            # taken the rest of the device, and these bytes are the way back of the next entry.
            left = had + freed - (0 if tensor is None else view_bytes(tensor))
            self._keep(min(left, required_bytes(cache)))
        if tensor is None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame: a cycle that would keep the callers' tensors
        return tensor

    def settle(self, cache: SpillingDict, notes: Notes, freed: int = 0) -> None:
        """Make the reserve as large as the largest group in host memory; where that is impossible, it is noted.

        On a full device the bytes that were just freed are kept instead: entries that come back one by one take the
        reserve with them, and the bytes that they leave are the next one's way back.
        """
        wanted, had = required_bytes(cache), self.reserve.nbytes
        if not self.reserve.keep(wanted):
            self._keep(min(wanted, had + freed))
            notes.add(
                "encoder_cache.restore_reserve_bytes",
                f"{self.reserve.nbytes} instead of {wanted}: the device has no room for more",
            )

    def drop_reserve(self) -> None:
        self.reserve.drop()

    def _ways(self, cache: SpillingDict, spilled: Spilled) -> list[Callable[[], int | None]]:
        """Return the ways to make room, cheapest first; each returns the bytes freed, None where it changed nothing."""
        if self._device.type == "cpu":  # what goes to the host there stays in the same memory
            return [self._empty_cache]
        return [
            self._empty_cache,
            partial(self._spill_idle, cache, spilled, view_bytes(spilled.host)),
            partial(self._spill_idle, cache, spilled, None),  # where the device is in fragments
            self._use_reserve,
            self._empty_cache,
        ]

    def _empty_cache(self) -> int:
        family, index = self._device.family, self._device.index
        family.give_back(index)
        # Our own reserve is in use, and so no part of what is left unused.
        self._allocator_reserve.learn_after_release(self._device, family.allocator(index, Notes()))
        return 0

    def _spill_idle(self, cache: SpillingDict, spilled: Spilled, asked: int | None) -> int | None:
        worker, notes = self._worker(), Notes()
        mover = Mover(self._device, notes)
        plan = make_plan(cache, _NO_TARGET, mover.copies.can_take, needed_hashes(worker), mover.device_type)
        # Entries of the same group that came back are most likely needed by the same request.
        idle = [group for group in plan.groups if all(cache.group(key) is not spilled.group for key in group.tensors)]
        del plan  # it holds the tensors, and the device gets them back with the last reference
        try:
            budget = read_host_budget(worker, self.host_budget_bytes, cache.host_bytes(), notes).left
        except RefusedError:  # nothing is known of the host's memory
            return None
        mover.spill(cache, idle, asked, budget)
        if not mover.entries:
            return None
        self._empty_cache()
        return mover.device_bytes

    def _use_reserve(self) -> int | None:
        if not self.reserve.nbytes:
            return None
        self.reserve.drop()
        return 0

    def _keep(self, nbytes: int) -> None:
        if nbytes > self.reserve.nbytes:
            self.reserve.keep(nbytes)


def required_bytes(cache: SpillingDict) -> int:
    return max((value.group.nbytes for value in cache.spilled().values()), default=0)
