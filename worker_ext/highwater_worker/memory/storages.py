"""The memory behind tensors: each storage once, however many views share it.

Encoder outputs are often slices of one batch's tensor, and layers share their KV cache: adding up tensors would count
the same bytes several times. Only metadata is read, never data; that also holds while an engine sleeps and the memory
behind it is unmapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
