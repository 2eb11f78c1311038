"""The KV cache: its memory, the part of it that is resident, and its layers as the engine describes them."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from highwater_worker.devices import is_host_memory
from highwater_worker.engine_view import as_int, look_up
from highwater_worker.errors import Notes, UnreadableError, printable
from highwater_worker.memory.storages import Storage, tensors_in, unique_storages

MAX_KINDS = 24  # layers that differ from one another; no model known has more than a handful
MAX_RUNS = 512
MAX_GROUPS = 64
_MAX_FIELDS = 32
_MAX_TEXT = 60
_SHORTEST_SECONDS = 2.0
_SHARE = 1000
"""A measurement is used for so many times its duration: it costs at most a thousandth of the engine's time."""
_CHUNK_PAGES = 1 << 18
_LOWEST_BIT = bytes(value & 1 for value in range(256))


class KvCache(NamedTuple):
    """The memory of keys and values in bytes, None where it could not be read."""

    resident_bytes: int | None
    reserved_bytes: int | None


NO_KV_CACHE = KvCache(None, None)


def kv_cache_storages(worker: object, device_type: str) -> list[Storage]:
    """Return the KV cache's storages, none where given back. Raises UnreadableError in an unknown place."""
    caches = look_up(worker, "model_runner", "kv_caches")
    layers = look_up(worker, "vllm_config", "compilation_config", "static_forward_context")
    if caches is None and layers is None:
        raise UnreadableError("neither model_runner.kv_caches nor compilation_config.static_forward_context is there")
    # The list alone is not enough: older engines put only the first layer of each index into it
    # (vllm 0.12.0 v1/worker/utils.py:324, `bind_kv_cache`). The layers alone are not either: not every one is
    # registered.
    tensors = list(tensors_in(caches))
    for layer in list(layers.values()) if isinstance(layers, dict) else ():
        tensors += tensors_in(look_up(layer, "kv_cache"))
    return unique_storages(tensors, device_type)


def describe_layers(specs: Mapping[str, object]) -> dict[str, Any]:
    """Return `kinds` (each different layer once) and `runs` (kind and count, in the model's order).

    So a model of hundreds of layers is described in a few hundred bytes. `specs` is what `get_kv_cache_spec` returns:
    by layer name, vLLM's own description (vllm 0.12.0 v1/kv_cache_interface.py:20, vllm 0.32.0
    v1/kv_cache_interface.py:165, `KVCacheSpec`). Raises UnreadableError for more than a file has room for.
    """
    kinds: list[dict[str, Any]] = []
    runs: list[list[int]] = []
    for spec in specs.values():
        described = describe_spec(spec)
        if described not in kinds:
            kinds.append(described)
        kind = kinds.index(described)
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
        if len(kinds) > MAX_KINDS or len(runs) > MAX_RUNS:
            raise UnreadableError(f"the model's {len(specs)} layers differ too often to be described")
    return {"kinds": kinds, "runs": runs}


def describe_groups(groups: Iterable[object]) -> list[dict[str, Any]]:
    """Return each group's description and number of layers. Raises UnreadableError for more than a file holds."""
    described = [
        {**describe_spec(look_up(group, "kv_cache_spec")), "layers": len(look_up(group, "layer_names") or ())}
        for group in groups
    ]
    if len(described) > MAX_GROUPS:
        raise UnreadableError(f"{len(described)} groups are too many to be described")
    return described


def describe_spec(spec: object) -> dict[str, Any]:
    """Return a layer's description: the name of its class as `kind`, its size as `page_bytes`, and its own fields.

    Every field that has a plain value is taken as it is called, so that a kind of layer that is new in a later vLLM
    is described too; of a data type its size is taken, as `dtype_bytes`.
    """
    described: dict[str, Any] = {"kind": type(spec).__name__}
    with suppress(Exception):  # computed: a kind of layer may have none, or compute it of what is not there
        described["page_bytes"] = as_int(getattr(spec, "page_size_bytes", None))
    for name, value in list(getattr(spec, "__dict__", {}).items())[:_MAX_FIELDS]:
        plain = _plain(value)
        size = as_int(getattr(value, "itemsize", None))
        if size is not None:
            described[f"{name}_bytes"] = size
        elif isinstance(value, tuple) and value and all(hasattr(one, "itemsize") for one in value):
            described[f"{name}_bytes"] = [as_int(one.itemsize) for one in value]
        elif plain is not None:
            described[name] = plain
    return described


def _plain(value: object) -> Any:  # noqa: ANN401 - a number, a text, or a list of lists of numbers
    if isinstance(value, bool):
        return value
    if isinstance(value, str):  # an enumeration of texts is its value
        return printable(str(getattr(value, "value", value)), _MAX_TEXT)
    number = as_int(value)
    if number is not None:
        return number
    if isinstance(value, (list, tuple)):
        plain = [_plain(one) for one in value[:_MAX_FIELDS]]
        return None if any(one is None for one in plain) else plain
    # A fraction, such as the tokens of a state; nested objects and mappings are not a layer's geometry.
    parts = as_int(getattr(value, "numerator", None)), as_int(getattr(value, "denominator", None))
    return f"{parts[0]}/{parts[1]}" if None not in parts else None


class Residency:
    """Measures the resident bytes of allocations, and remembers them.

    On a CPU worker reserved pages that were never written cost nothing yet, and the parts of its memory must fit into
    the process's resident size. `mincore` costs about 3 ms per GiB while the engine waits, so it is called seldom.
    """

    def __init__(
        self, measure: Callable[[int, int], int | None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._measure = measure or resident_bytes
        self._clock = clock
        self._resident_fully: set[tuple[int, int]] = set()
        self._partial: dict[tuple[int, int], tuple[int | None, float]] = {}

    def total(self, storages: Iterable[Storage]) -> int | None:
        parts = [self._resident(storage.pointer, storage.nbytes) for storage in storages]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def _resident(self, pointer: int, nbytes: int) -> int | None:
        key = (pointer, nbytes)
        # A storage once found whole stays so: vLLM gives no page of a KV cache back. On a machine that swaps, the
        # process's resident size can fall below it.
        if key in self._resident_fully:
            return nbytes
        value, until = self._partial.get(key, (None, float("-inf")))
        if self._clock() < until:
            return value
        started = self._clock()
        value = self._measure(pointer, nbytes)
        cost = self._clock() - started
        if value == nbytes:
            self._resident_fully.add(key)
            self._partial.pop(key, None)
        else:
            self._partial[key] = (value, self._clock() + max(_SHORTEST_SECONDS, _SHARE * cost))
        return value


def resident_bytes(pointer: int, nbytes: int) -> int | None:
    """Return how many bytes from `pointer` on are in memory, to the page; None where the C library has no `mincore`."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    page = mmap.PAGESIZE
    start = pointer // page * page
    pages = -(-(pointer + nbytes - start) // page)
    resident = 0
    for first in range(0, pages, _CHUNK_PAGES):
        vector = bytearray(min(_CHUNK_PAGES, pages - first))
        buffer = (ctypes.c_char * len(vector)).from_buffer(vector)
        if mincore(start + first * page, len(vector) * page, buffer) != 0:
            return None
        # Only the lowest bit of each byte is defined (mincore(2)).
        resident += vector.translate(_LOWEST_BIT).count(1)
    return min(nbytes, resident * page)


def read_kv_cache(worker: object, kind: str, residency: Residency, notes: Notes) -> KvCache:
    storages = notes.attempt("kv_cache_bytes", lambda: kv_cache_storages(worker, kind))
    if storages is None:
        return NO_KV_CACHE
    reserved = sum(storage.nbytes for storage in storages)
    if not is_host_memory(kind):
        return KvCache(reserved, reserved)
    resident = notes.attempt("kv_cache_bytes", lambda: residency.total(storages))
    notes.missing("kv_cache_bytes", resident, "the C library cannot show which pages are resident")
    return KvCache(resident, reserved)
