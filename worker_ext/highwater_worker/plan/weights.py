"""The bytes of a rank's weights, tensor by tensor, and as PyTorch's caching allocator counts them.

It does not split a block where 1 MiB or less would remain, and counts all of it:
Qwen2.5-7B has 14.19 GiB of tensors, and 14.25 GiB are counted and printed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

_MIB = 1 << 20
_ROUND = 512


class CachingAllocator:
    """Counts what is allocated and never given back, in bytes."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._free: dict[bool, list[int]] = {True: [], False: []}

    def allocate(self, size: int) -> None:
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        is_small = size <= _MIB
        free = self._free[is_small]
        block = min((one for one in free if one >= size), default=0)
        if block:
            free.remove(block)
        elif is_small:
            block = 2 * _MIB
        else:
            block = 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        if block - size >= (_ROUND if is_small else _MIB + 1):
            free.append(block - size)
            block = size
        self.allocated_bytes += block


def weights_of(models: list[Any]) -> tuple[int, int]:
    """Return the bytes of all tensors on the device, each storage once; and as the allocator counts them."""
    allocator, kind = CachingAllocator(), importlib.import_module("torch").Tensor
    tensors = (one for model in models for module in model.modules() for one in _tensors(module))
    storages = (one.untyped_storage() for one in tensors if isinstance(one, kind) and one.is_meta)
    sizes = {storage._cdata: storage.nbytes() for storage in storages if storage.nbytes()}
    for size in sizes.values():
        allocator.allocate(size)
    return sum(sizes.values()), allocator.allocated_bytes


def _tensors(module: Any) -> Iterator[Any]:
    """Yield what a module holds: parameters that stay on the card, buffers, and adapters' tuples of tensors."""
    for parameter in module._parameters.values():
        if parameter is not None and not getattr(parameter, "_vllm_is_uva_offloaded", False):
            yield parameter
    for one in (*module._buffers.values(), *vars(module).values()):
        yield from one if isinstance(one, (tuple, list)) else (one,)
