"""What vllm-ascend 0.23 calls that 0.30 does not: operators, on the CPU as those of tests/fakes/cann.

vLLM calls `register` in every process of an engine; it finds it by its entry point, on the engine's PYTHONPATH.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from cpu_kernels import KEY, computed, stand_in

# torch is not where this file is checked: its values have no types here.
Tensor: TypeAlias = Any
_libraries: list[Any] = []  # a kernel goes with its library
_CACHE = (
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_indices) -> ()"
)


def register() -> None:
    """Put the stand-ins in place, before vllm-ascend's worker is imported."""
    import torch_npu  # noqa: F401, PLC0415 - not before torch has registered its kernels
    import vllm.v1.worker.block_table as of_vllm  # noqa: PLC0415 - the engine's path alone has it
    from ascend_kernels import SlotMapping, npu_scatter_pa_kv_cache  # noqa: PLC0415 - as that

    stand_in("npu_add_rms_norm", npu_add_rms_norm)
    library = torch.library.Library("atb", "FRAGMENT")
    _libraries.append(library)
    library.impl(library.define(_CACHE), computed(npu_scatter_pa_kv_cache), KEY)
    of_vllm._compute_slot_mapping_kernel = SlotMapping()  # vLLM's own there, not yet one of vllm-ascend's


def npu_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    from ascend_kernels import npu_rms_norm  # noqa: PLC0415 - as above

    normal, scale = npu_rms_norm(x + residual, weight, epsilon)
    return normal, scale, x + residual
