"""The memory behind tensors, each storage once, however many views share it: the weights' and the KV cache's.

Encoder outputs are often slices of one batch's tensor, and layers share their KV cache: adding up tensors would count
the same bytes several times. Only metadata is read, never data; that also holds while an engine sleeps and the memory
behind it is unmapped.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from highwater_worker.devices import is_host_memory
from highwater_worker.engine_view import as_int, look_up
from highwater_worker.errors import Notes, UnreadableError, printable

_NESTING = 8
Tensor = Any  # a `torch.Tensor`, of which only metadata is read; torch is not there when types are checked


class Storage(NamedTuple):
    """One allocation that tensors are views of."""

    pointer: int
    nbytes: int
    device_type: str

    @property
    def key(self) -> tuple[str, int]:
        """The identity of a storage: a device and the host may use the same addresses."""
        return self.device_type, self.pointer


def tensors_in(value: object, nesting: int = _NESTING) -> Iterator[Tensor]:
    """Yield the tensors in a value: itself, or in its dicts, lists and tuples; everything else is passed over.

    The KV cache of one layer is a tensor, a tuple (vllm-ascend) or a list (Mamba); profiling puts dicts into the
    encoder cache (vllm 0.12.0 v1/worker/gpu_model_runner.py:4354, `profile_run`).
    """
    if is_tensor(value):
        yield value
    elif nesting and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, nesting - 1)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, by what it can do: this module does not import torch."""
    return hasattr(value, "untyped_storage")


def storage_of(tensor: Tensor) -> Storage:
    device_type = tensor.device.type
    try:
        storage = tensor.untyped_storage()
        return Storage(storage.data_ptr(), storage.nbytes(), device_type)
    except (NotImplementedError, RuntimeError):  # subclasses without a storage of their own
        return Storage(id(tensor), view_bytes(tensor), device_type)


def view_bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def unique_storages(tensors: Iterable[Tensor], device_type: str) -> list[Storage]:
    storages = {storage.key: storage for storage in map(storage_of, tensors) if storage.device_type == device_type}
    return [storage for storage in storages.values() if storage.nbytes]


# --- the weights ---


class WeightCount:
    """The bytes of models' weights, counted once: weights keep their size, and a large model has thousands of them."""

    def __init__(self) -> None:
        self._models: tuple[int, ...] = ()
        self._nbytes = 0

    def of(self, models: list[Any], device_type: str) -> int:
        identities = tuple(map(id, models))
        if self._models == identities:
            return self._nbytes
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        packed = [part for model in models for part in _packed(model)] if is_host_memory(device_type) else []
        tensors += [part for part in packed if not isinstance(part, int)]
        nbytes = sum(storage.nbytes for storage in unique_storages(tensors, device_type))
        self._models, self._nbytes = identities, nbytes + sum(part for part in packed if isinstance(part, int))
        return self._nbytes


def weights_bytes(worker: object, device_type: str, count: WeightCount) -> int:
    """Return the bytes of all weights on the device, a drafter's included. Raises UnreadableError without a model."""
    runner = look_up(worker, "model_runner")
    # Measured by the engine while it loaded (vllm 0.12.0 v1/worker/gpu_model_runner.py:3548, vllm 0.32.0
    # v1/worker/gpu_model_runner.py:5137, `load_model`), with what no parameter shows.
    measured = _measured(runner, device_type)
    if measured is not None:
        return measured
    models = _models(runner)
    if not models:
        raise UnreadableError("model_runner has neither model_memory_usage nor a model")
    return count.of(models, device_type)


def counting_caveat(worker: object, device_type: str) -> str | None:
    """Return a note about tensors that the count leaves out, None where weights are measured or nothing is left out."""
    runner = look_up(worker, "model_runner")
    if is_host_memory(device_type) or runner is None or _measured(runner, device_type) is not None:
        return None
    # Such as the matrices that attention with a compressed KV cache derives from its weights, plain attributes of its
    # implementation (vllm_ascend 0.13.0 attention/mla_v1.py:807).
    return (
        "the engine keeps no measurement of its loading: parameters and buffers were counted, and tensors that layers "
        "derive from them are with the other tensors"
    )


def _measured(runner: object, device_type: str) -> int | None:
    # Not on CPU, where V1 has no such number and V2's is a difference of the process's peak resident size.
    measured = as_int(look_up(runner, "model_memory_usage"))
    return measured if not is_host_memory(device_type) and measured is not None and measured > 0 else None


def _models(runner: object) -> list[Any]:
    found = []
    for method, *path in (("get_model", "model"), ("get_draft_model", "drafter", "model")):
        getter = look_up(runner, method)
        model = (getter() if callable(getter) else None) or look_up(runner, *path)
        if all(hasattr(model, name) for name in ("parameters", "buffers", "modules")):
            found.append(model)
    return found


def _packed(model: Any) -> Iterator[Tensor | int]:  # noqa: ANN401 - a torch.nn.Module
    """Yield the packed copies of linear weights of the CPU backend: a tensor, or the bytes behind a oneDNN handle.

    It keeps the packed copy in the closure of the layer's `cpu_linear` and drops the parameter (vllm 0.32.0
    model_executor/layers/utils.py:588, `dispatch_cpu_unquantized_gemm`): without it nearly all weights would be
    missing. A handle has its matrix's shape only; oneDNN pads a little more than that.
    """
    for module in model.modules():
        cells = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
        for cell in cells:
            content = cell.cell_contents
            rows, columns = as_int(look_up(content, "k")), as_int(look_up(content, "n"))
            if is_tensor(content):
                yield content
            elif rows and columns and rows > 0 and columns > 0:
                yield rows * columns * (as_int(look_up(module, "weight", "dtype", "itemsize")) or 0)


# --- the KV cache ---

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

    resident_bytes: int | None = None
    reserved_bytes: int | None = None


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
        parts: list[int | None] = []
        for storage in storages:
            key = (storage.pointer, storage.nbytes)
            value, until = self._partial.get(key, (None, float("-inf")))
            # A storage once found whole stays so: vLLM gives no page of a KV cache back. On a machine that swaps, the
            # process's resident size can fall below it.
            if key in self._resident_fully:
                value = storage.nbytes
            elif self._clock() >= until:
                started = self._clock()
                value = self._measure(*key)
                cost = self._clock() - started
                if value == storage.nbytes:
                    self._resident_fully.add(key)
                    self._partial.pop(key, None)
                else:
                    self._partial[key] = (value, self._clock() + max(_SHORTEST_SECONDS, _SHARE * cost))
            parts.append(value)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


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
        return KvCache()
    reserved = sum(storage.nbytes for storage in storages)
    if not is_host_memory(kind):
        return KvCache(reserved, reserved)
    resident = notes.attempt("kv_cache_bytes", lambda: residency.total(storages))
    notes.missing("kv_cache_bytes", resident, "the C library cannot show which pages are resident")
    return KvCache(resident, reserved)
