"""Kernels for the simulated NPU: every operator of torch_npu's is computed by torch's own kernel for the CPU.

Device memory is memory of this process there, so an operator works where its tensors lie, and only its result is
written to memory that torch_npu's allocator gave. What allocates, makes views or copies between host and device stays
torch_npu's own: that is what is tested. torch calls `register` in every process that imports it, by the entry point.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

KEY = "PrivateUse1"
# torch is not where this file is checked: its values have no types here.
Tensor: TypeAlias = Any
_OWN = frozenset(
    {
        *("empty.memory_format", "empty_strided", "empty_like", "resize_", "record_stream", "_local_scalar_dense"),
        *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
        *("is_pinned", "_pin_memory", "_to_copy", "copy_"),
    }
)
"""Operators that stay torch_npu's own, beside views; a copy, where it needs no kernel."""
_libraries: list[Any] = []  # a kernel goes with its library


def register() -> None:
    """Put the CPU's kernels in the place of torch_npu's."""
    import torch_npu  # noqa: F401, PLC0415 - it registers its own when it is imported, and may be imported first

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
        namespace, _, name = full_name.partition("::")
        operator = _operator(name) if namespace == "aten" and name not in _OWN else None
        if operator is not None and not operator.is_view:
            library.impl(name, computed(operator), KEY, allow_override=True)
    library.impl("copy_", _copy(torch.library.get_kernel("aten::copy_", KEY)), KEY, allow_override=True)


def stand_in(name: str, compute: Callable[..., Any]) -> None:
    """Compute an operator of torch_npu's own on the CPU: it gets CPU tensors in the place of the device's."""
    library = torch.library.Library("npu", "IMPL")
    _libraries.append(library)
    library.impl(name, computed(compute), KEY, allow_override=True)


def computed(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls `compute` on the same memory, and puts its results on the device."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given: list[tuple[Tensor, Tensor]] = []
        device = kwargs.get("device")

        def on_cpu(value: Any) -> Any:
            if not _is_ours(value):
                return value
            given.append((seen_by_cpu(value), value))
            return given[-1][0]

        args, kwargs = tree_map(on_cpu, args), tree_map(on_cpu, kwargs)
        if device is not None:
            kwargs["device"], kwargs["pin_memory"] = torch.device("cpu"), None
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs["generator"] = None
        results, place = compute(*args, **kwargs), given[0][1].device if given else device
        return tree_map(lambda result: _given_back(result, given, place), results)

    return kernel


def _given_back(result: Any, given: list[tuple[Tensor, Tensor]], device: torch.device) -> Any:
    """Return a result on the device: an argument, or a view of one, as such, and another one copied."""
    if not isinstance(result, torch.Tensor):
        return result
    for seen, own in given:
        if seen is result:
            return own
        if _shares_memory(seen, result):
            return own.as_strided(result.shape, result.stride(), result.storage_offset())
    return uploaded(result, device)


def seen_by_cpu(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    elements = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(elements, tensor.storage_offset(), tensor.shape, tensor.stride())


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    seen_by_cpu(made).copy_(tensor)
    return made


def _copy(own: Any) -> Callable[..., Tensor]:
    """Return the kernel of a copy: torch_npu's own between host and device, where it needs no kernel of the device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        is_plain = to.is_contiguous() and source.is_contiguous()
        if _is_ours(to) != _is_ours(source) and is_plain and to.dtype == source.dtype and to.shape == source.shape:
            own.call_boxed(keys, to, source, non_blocking)
        else:
            ends = [seen_by_cpu(end) if _is_ours(end) else end for end in (to, source)]
            ends[0].copy_(ends[1])
        return to

    return copy


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.dtype == other.dtype)


def _is_ours(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
