"""The encoder cache of one worker, read without changing it: entries, sizes, and the requests that need them.

Both model runners are known: V1 keeps a dict on the runner, V2 an `EncoderCache` around one. Nothing is changed: an
entry that the scheduler expects and that is missing ends the engine (`Encoder cache miss`). Entries in host memory are
read there.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from highwater_worker.attributes import look_up, whole
from highwater_worker.encoder_cache.spilling_dict import Ledger, Spilled, SpillingDict
from highwater_worker.errors import Notes, UnreadableError
from highwater_worker.identity import pp_rank
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


def read_entries(worker: object) -> list[Entry] | None:
    """Return the entries; None without a cache: a text model, a later stage. Raises as `find_encoder_cache`."""
    cache = find_encoder_cache(worker)
    if cache is None:
        return None
    # dict's own items(): a subclass that brings entries back from the host at access must not do that here. And a copy
    # at once: under Ray's compiled graphs a step may run beside this call.
    return [read_entry(cache, mm_hash, value) for mm_hash, value in list(dict.items(cache))]


def read_entry(outputs: dict[Any, Any], key: object, value: object) -> Entry:
    entry = _entry(str(key), value)
    if isinstance(outputs, SpillingDict):
        return entry._replace(origin=outputs.origin(key) or entry.origin, idle_seconds=outputs.idle_seconds(key))
    return entry


def moves(ledger: Ledger) -> dict[str, Any]:
    return {"spills": ledger.spills, "restores": ledger.restores, "restore_seconds": round(ledger.restore_seconds, 6)}


def find_encoder_cache(worker: object) -> dict[Any, Any] | None:
    """Return the dict that holds the entries, None without one. Raises UnreadableError for an unknown kind."""
    runner = look_up(worker, "model_runner")
    cache = look_up(runner, "encoder_cache")
    if cache is None:
        return None
    if isinstance(cache, dict):
        # V1 has the dict for every model (vllm 0.12.0 v1/worker/gpu_model_runner.py:367, vllm 0.32.0
        # v1/worker/gpu_model_runner.py:579, `__init__`).
        unused = look_up(runner, "supports_mm_inputs") is False and not dict.__len__(cache)
        return None if unused else cache
    outputs = look_up(cache, "encoder_outputs")  # no truth test of `cache`: an empty EncoderCache is falsy
    if isinstance(outputs, dict):
        return outputs
    raise UnreadableError(f"model_runner.encoder_cache is a {type(cache).__name__}, neither a dict nor around one")


def spilling_cache(worker: object) -> SpillingDict | None:
    """Return the worker's encoder cache where it is a `SpillingDict` already; None where it is not, or is absent."""
    cache = find_encoder_cache(worker)
    return cache if isinstance(cache, SpillingDict) else None


def encoder_cache_kind(worker: object) -> str | None:
    """Return `dict` (model runner V1), `encoder_outputs` (V2), or None without a cache."""
    cache = find_encoder_cache(worker)
    if cache is None:
        return None
    return "dict" if cache is look_up(worker, "model_runner", "encoder_cache") else "encoder_outputs"


def note_odd_absence(worker: object, name: str, notes: Notes) -> None:
    """Note under `name` that a worker without an encoder cache should have one.

    It is the only sign of an engine that keeps its encoder outputs in an unknown place.
    """
    runner = look_up(worker, "model_runner")
    is_multimodal = look_up(worker, "vllm_config", "model_config", "is_multimodal_model") is True
    # Without one also of a multimodal model: a model configured for text alone, and the later stages of a pipeline
    # (vllm 0.32.0 v1/worker/gpu/model_runner.py:269).
    is_first_stage = look_up(runner, "is_first_pp_rank") is not False and not pp_rank(worker)
    if runner is not None and is_multimodal and is_first_stage and look_up(runner, "supports_mm_inputs") is not False:
        notes.add(name, "the model is multimodal, but no encoder cache was found where vLLM 0.11 to 0.33 keeps it")


def restore_reserve_bytes(worker: object) -> int:
    cache = spilling_cache(worker)
    return 0 if cache is None else cache.restorer.reserve_bytes


def needed_hashes(worker: object) -> set[str] | None:
    """Return the cache keys that running requests have not yet computed past; None where that is unknown.

    Requests that still wait are unknown to a worker, though the scheduler may count on an entry for them: absence from
    this set is no permission to drop an entry.
    """
    pairs = _features_with_progress(worker)
    if pairs is None:
        return None
    needed: set[str] = set()
    for feature, computed in pairs:
        offset = whole(look_up(feature, "mm_position", "offset"))
        length = whole(look_up(feature, "mm_position", "length"))
        if computed is None or offset is None or length is None or computed < offset + length:
            needed.add(str(look_up(feature, "identifier")))
    return needed


def _features_with_progress(worker: object) -> Iterator[tuple[object, int | None]] | None:
    requests = look_up(worker, "model_runner", "requests")
    if isinstance(requests, dict):
        return (
            (feature, whole(look_up(request, "num_computed_tokens")))
            for request in list(requests.values())
            for feature in look_up(request, "mm_features") or ()
        )
    features = look_up(worker, "model_runner", "encoder_cache", "mm_features")
    if isinstance(features, dict):
        return (
            (feature, _computed_in_v2(worker, request_id))
            for request_id, items in list(features.items())
            for feature in items
        )
    return None


def _computed_in_v2(worker: object, request_id: str) -> int | None:
    # In host memory: nothing must wait for the copy on the device. Not num_computed_tokens_np, which runs ahead of the
    # device (vllm 0.32.0 v1/worker/gpu/states.py:65).
    states = look_up(worker, "model_runner", "req_states")
    index = (look_up(states, "req_id_to_index") or {}).get(request_id)
    computed = look_up(states, "num_computed_prefill_tokens")
    return None if index is None or computed is None else whole(computed[index])


def _entry(mm_hash: str, value: object) -> Entry:
    # Nearly always one tensor; a cache holds thousands of them, and the engine waits meanwhile.
    if is_tensor(value):
        storage = storage_of(value)
        return Entry(mm_hash, [value], {storage.key: storage} if storage.nbytes else {}, storage.key, None, value)
    if isinstance(value, Spilled):
        storage = Storage(storage_of(value.host).pointer, value.host_bytes, _HOST)
        return Entry(mm_hash, [value.host], {storage.key: storage}, value.origin, None, value)
    tensors = list(tensors_in(value))
    storages = {storage.key: storage for storage in map(storage_of, tensors) if storage.nbytes}
    return Entry(mm_hash, tensors, storages, next(iter(storages), None), None, value)


def entry_embeds(entry: Entry) -> int:
    """Return the embeddings of the entry, the unit of the cache's capacity: its rows, each as wide as the model."""
    return sum(prod(tensor.shape[:-1]) for tensor in entry.tensors)


def entry_bytes(entry: Entry) -> int:
    """Return the bytes of the entry's own elements, without the other bytes of its storages."""
    return sum(map(view_bytes, entry.tensors))
