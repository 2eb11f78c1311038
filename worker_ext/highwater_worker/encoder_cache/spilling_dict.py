"""The dict in the place of the engine's encoder cache: some values lie in host memory until the engine reads them.

It refuses to lose a key: a spilled entry keeps its key and its place, and every way to its value brings it back to the
device first. The engine never notices, but for the time that takes. The raw values (`dict.items(cache)`) are for
this package alone, which reads its entries without a change: a missing one ends the engine (`Encoder cache miss`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

from highwater_worker.engine_view import find_encoder_cache
from highwater_worker.errors import Notes
from highwater_worker.memory.storages import Storage, Tensor, is_tensor, storage_of, tensors_in, view_bytes
from highwater_worker.state import Ledger

# The methods of vLLM and vllm-ascend that pop entries, all of them to free them, whatever `pop` returns: runner V1's up
# to 0.23 and from 0.27 on, and V2's (`tests.own_engine.test_vendor_wheels` reads them in published packages).
FREEING = frozenset({"_update_states", "_process_encoder_cache_scheduler_output", "free_encoder_cache"})
_HOST = "host"
"""Instead of a device's type, for storages that were moved to host memory: on a CPU worker the types are the same."""


@dataclass(frozen=True, eq=False)
class SpilledGroup:
    """The entries that were views of one storage, and went together."""

    nbytes: int  # that the device got back for all of them


@dataclass(frozen=True)
class Spilled:
    """The value in the dict of an entry that lies in host memory."""

    host: Tensor
    device: Any  # that it came from, and goes back to
    host_bytes: int
    """The bytes of the host that the copy takes; more than its elements' where the allocator rounds up."""
    origin: tuple[str, int]
    """The storage that it was made in: by it an entry that came back differs from one made anew."""
    group: SpilledGroup
    is_pinned: bool = False
    """True where its pages are locked in place: the device can then read them while Python goes on."""


class EntryRestorer(Protocol):
    @property
    def reserve_bytes(self) -> int:
        """The bytes kept on the device for entries to come back into."""

    def bring(self, cache: SpillingDict, spilled: Spilled, *, is_urgent: bool) -> Tensor:
        """Return the entry on its device, or raise a RuntimeError where there is no room."""

    def settle(self, cache: SpillingDict, notes: Notes, freed: int = 0) -> None:
        """Make the reserve as large as entries in host memory need; where that is impossible, it is noted."""

    def drop_reserve(self) -> None:
        """Keep nothing on the device."""


class SpillingDict(dict[Any, Any]):
    """A dict of encoder outputs, some of them in host memory; one whose way back fails stays there."""

    __slots__ = ("_away", "_clock", "_is_freeing", "_ledger", "_returned", "_since", "_tick", "_uses", "restorer")

    def __init__(
        self,
        contents: Mapping[Any, Any],
        restorer: EntryRestorer,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(contents)
        self.restorer = restorer
        self._ledger = ledger
        self._clock = clock
        self._since = clock()
        # Counted, not timed: ranks that share a model see the same accesses in the same order, and so agree on which
        # entry was used last; by their clocks they would not.
        self._tick = 0
        self._uses: dict[Any, tuple[int, float]] = {}
        # Of entries that came back: the storage that each was made in, and the group that it came back from.
        self._returned: dict[Any, tuple[tuple[str, int], SpilledGroup]] = {}
        # Keys that may lie in host memory. One is added before its entry goes and taken out after it came back, so that
        # no key is missing, whatever ends a move in the middle.
        self._away: set[Any] = set()
        self._is_freeing = False

    # --- for trim and restore ---

    def spilled(self) -> dict[Any, Spilled]:
        return {key: value for key, value in super().items() if type(value) is Spilled}

    def host_bytes(self) -> int:
        return sum(value.host_bytes for value in self.spilled().values())

    def last_use(self, key: Hashable) -> int:
        """Return the number of the engine's last access to an entry; 0 without one since the cache is watched."""
        use = self._uses.get(key)
        return use[0] if use else 0

    def idle_seconds(self, key: Hashable) -> float:
        use = self._uses.get(key)
        return self._clock() - (use[1] if use else self._since)

    def origin(self, key: Hashable) -> tuple[str, int] | None:
        """Return the storage that an entry was made in, None where it still lies there."""
        returned = self._returned.get(key)
        return returned[0] if returned else None

    def group(self, key: Hashable) -> SpilledGroup | None:
        returned = self._returned.get(key)
        return returned[1] if returned else None

    def put_away(self, spilled: Mapping[Any, Spilled]) -> None:
        """Put entries' copies in host memory in their place. This counts as no access: their last use stays."""
        for key, value in spilled.items():
            self._away.add(key)
            super().__setitem__(key, value)
            self._ledger.spills += 1

    def bring_back(self, key: Hashable, value: Spilled, *, is_urgent: bool = False) -> Tensor:
        """Return a spilled entry, on its device again, or raise and leave it; others make room for an urgent one."""
        tensor = self._timed(value, is_urgent=is_urgent)
        # The first origin, however often it goes and comes back.
        self._returned[key] = self.origin(key) or value.origin, value.group
        super().__setitem__(key, tensor)
        self._ledger.restores += 1
        self._left_the_host(key)
        return tensor

    # --- for the engine: single entries ---

    def __getitem__(self, key: Hashable) -> Any:  # noqa: ANN401 - a dict's values are of any type
        value = super().__getitem__(key)
        if type(value) is Spilled:
            value = self.bring_back(key, value, is_urgent=True)
        self._tick += 1
        self._uses[key] = self._tick, self._clock()
        return value

    def __setitem__(self, key: Hashable, value: object) -> None:
        super().__setitem__(key, value)
        self._forget(key)
        self._tick += 1
        self._uses[key] = self._tick, self._clock()

    def __delitem__(self, key: Hashable) -> None:
        super().__delitem__(key)
        self._forget(key)

    def pop(self, key: Hashable, *default: Any) -> Any:  # noqa: ANN401 - as above
        value = super().pop(key, *default)
        self._forget(key)
        # To bring an entry back that is freed would wait for the device, and allocate on it, for a value that is
        # thrown away.
        return value.host if type(value) is Spilled and self._is_freeing else self._last_value(value)

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Within, `pop` does not bring an entry back; for one of `FREEING`."""
        before, self._is_freeing = self._is_freeing, True
        try:
            yield
        finally:
            self._is_freeing = before

    def popitem(self) -> tuple[Any, Any]:
        key, value = super().popitem()
        self._forget(key)
        return key, self._last_value(value)

    def _last_value(self, value: Any) -> Any:  # noqa: ANN401 - as above
        if type(value) is not Spilled:
            return value
        try:
            tensor = self._timed(value, is_urgent=True)
        except Exception:  # noqa: BLE001 - the entry is gone, as it had to: to free must not fail for want of memory
            return value.host  # the same tensor, and all that is left to give
        self._ledger.restores += 1
        return tensor

    def _timed(self, value: Spilled, *, is_urgent: bool) -> Tensor:
        started = time.perf_counter()
        try:
            return self.restorer.bring(self, value, is_urgent=is_urgent)
        finally:
            self._ledger.restore_seconds += time.perf_counter() - started

    def _forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)
        self._returned.pop(key, None)
        self._left_the_host(key)

    def _left_the_host(self, key: Hashable) -> None:
        if key in self._away:
            self._away.discard(key)
            if not self._away:
                self.restorer.drop_reserve()

    # --- for the engine: all entries ---

    def clear(self) -> None:
        super().clear()
        self._uses.clear()
        self._returned.clear()
        if self._away:
            self._away.clear()
            self.restorer.drop_reserve()

    # By [] and []=: dict's own hand out raw values, and write past `__setitem__`. Pairs are taken one by one, for vLLM
    # hands in generators that encode.
    get = MutableMapping.get  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update
    items = MutableMapping.items  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    __eq__ = Mapping.__eq__
    __hash__ = None  # as dict's

    # In Python, though it adds nothing: `dict(cache)`, `{**cache}`, `other.update(cache)` copy raw values from a dict
    # whose __iter__ is dict's own (CPython, Objects/dictobject.c, `dict_merge`), and go by keys() and [] otherwise.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def copy(self) -> dict[Any, Any]:
        """Return a plain dict with the values as they are now; the copy is not watched."""
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[dict[Any, Any]]]:  # noqa: ANN401 - object's own
        # For copy.copy, copy.deepcopy and pickle: again a plain dict.
        return dict, (dict(self),)

    def __or__(self, other: Any) -> Any:  # noqa: ANN401 - as dict's
        return dict(self) | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:  # noqa: ANN401 - as dict's
        return other | dict(self) if isinstance(other, dict) else NotImplemented

    def __ior__(self, other: Any) -> Any:  # noqa: ANN401 - as dict's
        self.update(other)
        return self

    def __ne__(self, other: object) -> bool:
        return not self == other  # dict's own would compare raw values

    def __repr__(self) -> str:
        # Without the values: printing a cache must not move its entries.
        return f"<{type(self).__name__} of {len(self)} entries, {len(self.spilled())} of them in host memory>"


# --- its entries, as this package reads them ---


class Entry(NamedTuple):
    """The output of one multimodal item."""

    mm_hash: str
    tensors: list[Tensor]
    storages: dict[tuple[str, int], Storage]
    origin: tuple[str, int] | None = None  # the storage that it was made in
    idle_seconds: float | None = None  # since the engine's last access; None where the cache is not watched
    value: object = None  # raw, as in the dict

    @property
    def nbytes(self) -> int:
        """Of its own elements, without the other bytes of its storages."""
        return sum(map(view_bytes, self.tensors))

    @property
    def embeds(self) -> int:
        """The embeddings, the unit of the cache's capacity: its rows, each as wide as the model."""
        return sum(prod(tensor.shape[:-1]) for tensor in self.tensors)


def spilling_cache(worker: object) -> SpillingDict | None:
    """Return the worker's encoder cache where it is a `SpillingDict` already; None where it is not, or is absent."""
    cache = find_encoder_cache(worker)
    return cache if isinstance(cache, SpillingDict) else None


def read_entries(worker: object) -> list[Entry] | None:
    """Return the entries; None without a cache. Raises as `find_encoder_cache`."""
    cache = find_encoder_cache(worker)
    if cache is None:
        return None
    # dict's own items(): a subclass that brings entries back from the host at access must not do that here. And a copy
    # at once: under Ray's compiled graphs a step may run beside this call.
    return [read_entry(cache, mm_hash, value) for mm_hash, value in list(dict.items(cache))]


def read_entry(outputs: dict[Any, Any], key: object, value: object) -> Entry:
    # Nearly always one tensor; a cache holds thousands of them, and the engine waits meanwhile.
    tensors: list[Tensor]
    origin: tuple[str, int] | None
    if is_tensor(value):
        storage = storage_of(value)
        tensors, storages, origin = [value], {storage.key: storage} if storage.nbytes else {}, storage.key
    elif isinstance(value, Spilled):
        storage = Storage(storage_of(value.host).pointer, value.host_bytes, _HOST)
        tensors, storages, origin = [value.host], {storage.key: storage}, value.origin
    else:
        tensors = list(tensors_in(value))
        storages = {storage.key: storage for storage in map(storage_of, tensors) if storage.nbytes}
        origin = next(iter(storages), None)
    if not isinstance(outputs, SpillingDict):
        return Entry(str(key), tensors, storages, origin, None, value)
    return Entry(str(key), tensors, storages, outputs.origin(key) or origin, outputs.idle_seconds(key), value)
