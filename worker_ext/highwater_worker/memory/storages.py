"""The memory behind tensors: each storage once, however many views share it; and that of the model's weights.

Encoder outputs are often slices of one batch's tensor, and layers share their KV cache: adding up tensors would count
the same bytes several times. Only metadata is read, never data; that also holds while an engine sleeps and the memory
behind it is unmapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from highwater_worker.devices import is_host_memory
from highwater_worker.engine_view import as_int, look_up
from highwater_worker.errors import UnreadableError

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
