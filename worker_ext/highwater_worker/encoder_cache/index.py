"""The encoder cache's entries, kept up to date: by the recorder in slices, by operations in one go.

An entry is read once, when it is first seen; afterwards it is only compared with the one before. From one slice to the
next only weak references to the engine's objects are kept: what the engine drops is freed at once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from highwater_worker.devices import Device, HostMemory
from highwater_worker.encoder_cache.mover import HostCopies, Movability, RestoreReserve, read_host_budget
from highwater_worker.encoder_cache.spilling import refuse_trim, restorer_of
from highwater_worker.encoder_cache.spilling_dict import Entry, read_entry, spilling_cache
from highwater_worker.engine_view import encoder_budget, find_encoder_cache, look_up, needed_hashes
from highwater_worker.errors import Notes, printable
from highwater_worker.memory.storages import Storage
from highwater_worker.state import state_of
from highwater_worker.wire import MAX_ROWS, ROW

_SLICE_SECONDS = 0.0005
_SHARE = 500
"""After a slice there is none for so many times its duration: at most a 500th of the engine's thread."""
_PASS_SECONDS = 1.0
_HASH_CHARACTERS = 64
_MISSING = object()
_BATCH = 16  # entries between two readings of the clock


# --- which storages may go to host memory ---


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
    """A cache's storages, and the totals of all and of those on the device that may go; each storage counts once.

    A storage that entries share goes with all of them, or not at all: the device gets it back with its last view.
    """

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


# --- the entries ---


class _Row(NamedTuple):
    value: Callable[[], object]  # a weak reference
    packed: bytes
    movability: Movability
    embeds: int
    is_on_host: bool
    origin: tuple[str, int] | None
    seen_at: float


class EncoderIndex:
    """Follows one worker's encoder cache; `cost_clock` times the slices."""

    def __init__(self, device: Device, cost_clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._copies = HostCopies(device)
        self._cost_clock = cost_clock
        self._rows: dict[Any, _Row] = {}
        self._groups = Groups(device.type)
        self._embeds = self._host_entries = 0
        self._figures: dict[str, Any] | None = None
        self._oldest_seen_at: float | None = None
        self._keys: Iterator[Any] | None = None  # the keys that the pass under way has still to look at
        self._of: int | None = None  # the id of the dict that the rows are of
        self._change: object = None  # the value of `change` when the last whole pass began
        self._change_then: object = None  # its value when the pass under way began
        self._now = self._pass_due = self._slice_due = float("-inf")
        self._is_changed = False
        self.is_new = True  # true where a whole pass has found other rows than `table` returned last
        self.trimmable_bytes: int | None = None
        """The bytes that the device would gain by a trim, as of the last whole pass; None where that is unknown."""

    def update(self, worker: object, now: float, change: object, host: HostMemory, *, in_full: bool) -> None:
        """Go on reading, if it is due at `now` (monotonic seconds) and if anything may have changed.

        `change` is a value that differs after everything that may have changed the cache; None where that is unseen.
        With `in_full` the cache is read to its end, however long that takes. Raises UnreadableError: an unknown kind.
        """
        self._now = now
        if not in_full and now < self._slice_due:
            return
        if self._keys is None and not (in_full or now >= self._pass_due):
            return
        if in_full:
            self._keys = None
        started = self._cost_clock()
        try:
            if self._read(worker, now, change, None if in_full else started + _SLICE_SECONDS):
                self.trimmable_bytes = None
                with suppress(Exception):  # a trim would be refused, mostly, and a trim says why; this figure is lost
                    self.trimmable_bytes = self._trimmable(worker, host)
        except BaseException:
            self._forget(now)
            raise
        finally:
            self._slice_due = now + _SHARE * (self._cost_clock() - started)

    def figures(self, worker: object) -> dict[str, Any] | None:
        """Return the cache's figures as of the last whole pass; None before the first, and without a cache."""
        if self._figures is None:
            return None
        state = state_of(worker)
        budget = encoder_budget(worker, look_up(state.start, "encoder_budget"))
        oldest = None if self._oldest_seen_at is None else round(max(self._now - self._oldest_seen_at, 0.0), 3)
        cache = spilling_cache(worker)
        return {
            **self._figures,
            "capacity_embeds": (budget or {}).get("cache_size"),
            "oldest_age_seconds": oldest,
            "restore_reserve_bytes": 0 if cache is None else cache.restorer.reserve_bytes,
            **state.ledger.figures(),
        }

    def ages(self) -> dict[str, float]:
        """Return by mm_hash the seconds since each entry was first seen.

        No engine records when an entry was made: this is a lower bound. An entry made anew under its old hash, on
        another storage, starts again at 0.
        """
        return {str(key): self._now - row.seen_at for key, row in self._rows.items()}

    def table(self) -> tuple[int, bytes]:
        """Return how many entries there are, and the rows of those that were seen first."""
        self.is_new = False
        rows = [row.packed for row in self._rows.values()]
        return len(rows), b"".join(rows[:MAX_ROWS])

    def _read(self, worker: object, now: float, change: object, deadline: float | None) -> bool:
        if self._keys is None:
            if change is not None and change == self._change:
                self._pass_due = now + _PASS_SECONDS
                return False
            self._change_then = change
        cache = find_encoder_cache(worker)
        if cache is None:
            self._forget(now)
            return True
        if self._keys is None or self._of != id(cache):
            # dict's own functions: a subclass that brings entries back from the host at access must not do that here.
            self._keys, self._of = iter(list(dict.keys(cache))), id(cache)
        for number, key in enumerate(self._keys, 1):
            value = dict.get(cache, key, _MISSING)
            row = self._rows.get(key)
            if value is not _MISSING and (row is None or row.value() is not value):
                self._put(key, value, read_entry(cache, key, value), now)
            if deadline is not None and number % _BATCH == 0 and self._cost_clock() > deadline:
                return False
        for key in [key for key in self._rows if not dict.__contains__(cache, key)]:
            self._count(self._rows.pop(key), -1)
            self._is_changed = True
        self.is_new, self._is_changed = self.is_new or self._is_changed, False
        self._figures = {
            "entries": len(self._rows),
            "device_bytes": self._groups.device_bytes,
            "host_bytes": self._groups.host_bytes,
            "host_entries": self._host_entries,
            "embeds": self._embeds,
        }
        # Rows come at the end, and one that stays where it is keeps its place.
        self._oldest_seen_at = next((row.seen_at for row in self._rows.values()), None)
        self._keys, self._change, self._pass_due = None, self._change_then, now + _PASS_SECONDS
        return True

    def _trimmable(self, worker: object, host: HostMemory) -> int:
        """Return what the device would gain by a `trim` without a target now, less what would be kept for the way back.

        Nothing is moved. `trim` decides for itself: the needs of running requests, and the room on the host, may be
        different a moment later. Raises RefusedError where a trim would be refused, or may be.
        """
        if self._figures is None:  # there is no cache
            return 0
        refuse_trim(worker)
        cache = spilling_cache(worker)
        restorer = None if cache is None else restorer_of(cache)
        reserve = RestoreReserve(self._device) if restorer is None else restorer.reserve
        allowed = None if restorer is None else restorer.host_budget_bytes
        budget = read_host_budget(worker, allowed, self._groups.spilled_bytes, Notes(), host).left
        # Where a runner does not show what is needed, a trim holds nothing back.
        needed = (self._rows[key] for key in needed_hashes(worker) or () if key in self._rows)
        movable, fitting = self._groups.without((one for row in needed for one in row.movability.storages), budget)
        # As `trim` has it: where all that could go is what would be kept, nothing goes.
        if movable.nbytes <= reserve.growth(movable.largest):
            return 0
        return max(0, fitting.nbytes - reserve.growth(fitting.largest))

    def _put(self, key: Any, value: object, entry: Entry, now: float) -> None:  # noqa: ANN401 - a dict's
        before = self._rows.get(key)
        # An entry that only went to the host and came back keeps its age.
        same = before is not None and before.origin == entry.origin
        seen_at = before.seen_at if before is not None and same else now
        can_move = self._copies.movability(entry)
        storages = can_move.storages
        is_on_host = bool(storages) and all(storage.device_type != self._device.type for storage in storages)
        try:
            reference: Callable[[], object] = weakref.ref(value)
        except TypeError:  # a list or a tuple: read anew each time
            reference = lambda: None  # noqa: E731 - as a weak reference to what is gone
        text = printable(entry.mm_hash)[:_HASH_CHARACTERS].encode("ascii", "replace")
        row = _Row(
            value=reference,
            packed=ROW.pack(text, entry.nbytes, seen_at, is_on_host),
            movability=can_move,
            embeds=entry.embeds,
            is_on_host=is_on_host,
            origin=entry.origin,
            seen_at=seen_at,
        )
        if before is not None:
            self._count(before, -1)
            if not same:
                del self._rows[key]
        self._rows[key] = row
        self._count(row, 1)
        self._is_changed = True

    def _count(self, row: _Row, sign: int) -> None:
        self._embeds += sign * row.embeds
        self._host_entries += sign * row.is_on_host
        (self._groups.add if sign > 0 else self._groups.remove)(row.movability)

    def _forget(self, now: float) -> None:
        self.is_new = self.is_new or bool(self._rows)
        self._rows, self._groups, self._embeds, self._host_entries = {}, Groups(self._device.type), 0, 0
        self._figures = self._oldest_seen_at = self._keys = self._of = self._change = self.trimmable_bytes = None
        self._pass_due = now + _PASS_SECONDS


def index_of_operations(worker: object, device: Device) -> EncoderIndex:
    """Return the index that operations keep, as it was read last; the recorder has its own."""
    state = state_of(worker)
    index = state.index if isinstance(state.index, EncoderIndex) else EncoderIndex(device)
    state.index = index
    return index


def read_index(worker: object, device: Device) -> EncoderIndex:
    """Return the index that operations keep, read to the end. Raises UnreadableError for an unknown kind of cache."""
    index = index_of_operations(worker, device)
    index.update(worker, time.monotonic(), None, HostMemory(), in_full=True)
    return index


def encoder_cache_figures(worker: object, device: Device) -> dict[str, Any] | None:
    return read_index(worker, device).figures(worker)
