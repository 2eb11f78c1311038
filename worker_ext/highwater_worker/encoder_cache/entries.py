"""The entries of the encoder cache, read without changing it: a missing one ends the engine (`Encoder cache miss`).

Entries in host memory are read there.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from highwater_worker.encoder_cache.spilling_dict import Spilled, SpillingDict
from highwater_worker.engine_view import find_encoder_cache
from highwater_worker.memory.storages import Storage, Tensor, is_tensor, storage_of, tensors_in, view_bytes

_HOST = "host"
"""Instead of a device's type, for storages that were moved to host memory: on a CPU worker the types are the same."""


class Entry(NamedTuple):
    """The output of one multimodal item."""

    mm_hash: str
    tensors: list[Tensor]
    storages: dict[tuple[str, int], Storage]
    origin: tuple[str, int] | None = None  # the storage that it was made in
    idle_seconds: float | None = None  # since the engine's last access; None where the cache is not watched
    value: object = None  # raw, as in the dict


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


def entry_embeds(entry: Entry) -> int:
    """Return the embeddings of the entry, the unit of the cache's capacity: its rows, each as wide as the model."""
    return sum(prod(tensor.shape[:-1]) for tensor in entry.tensors)


def entry_bytes(entry: Entry) -> int:
    """Return the bytes of the entry's own elements, without the other bytes of its storages."""
    return sum(map(view_bytes, entry.tensors))
