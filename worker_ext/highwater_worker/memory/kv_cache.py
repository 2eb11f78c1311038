"""The memory reserved for keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater_worker.attributes import look_up
from highwater_worker.errors import UnreadableError
from highwater_worker.memory.storages import tensors_in, unique_storages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from highwater_worker.memory.storages import Storage, Tensor


def kv_cache_storages(worker: object, device_type: str) -> list[Storage]:
    """Return the storages of the KV cache on the worker's device, each once; none where it was given back.

    Raises:
        UnreadableError: The engine shows no KV cache in either of the places that we know.
    """
    caches = look_up(worker, "model_runner", "kv_caches")
    layers = look_up(worker, "vllm_config", "compilation_config", "static_forward_context")
    if caches is None and layers is None:
        raise UnreadableError("neither model_runner.kv_caches nor compilation_config.static_forward_context is there")
    return unique_storages(_tensors(caches, layers), device_type)


def _tensors(caches: object, layers: object) -> Iterator[Tensor]:
    # The list alone is not enough: older engines put only the first layer of each index into it
    # (vllm 0.12.0 v1/worker/utils.py:324, `bind_kv_cache`). The layers alone are not either: not every one is
    # registered.
    yield from tensors_in(caches)
    for layer in list(layers.values()) if isinstance(layers, dict) else ():
        yield from tensors_in(look_up(layer, "kv_cache"))
