"""In the place of vLLM's compiled kernels: the operators that it looks up or asks before any layer computes.

`bench/device/vllm_files.py` puts this file where vLLM imports its library. With custom operators off nothing calls a
kernel: each has a name here and no more, so that a call would fail with PyTorch's own message.
"""

from __future__ import annotations

from typing import Any

import torch

_LOOKED_UP = ("silu_and_mul(Tensor! result, Tensor input) -> ()",)
"""By a layer of the demonstration's model, when it is built (vllm 0.26.0 model_executor/layers/activation.py:137)."""
_ASKED = (
    "cutlass_scaled_mm_supports_fp8(int capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8(int capability) -> bool",
    "cutlass_scaled_mm_supports_fp4(int capability) -> bool",
    "cutlass_group_gemm_supported(int capability) -> bool",
)
"""Questions for kernels, answered with no (vllm 0.26.0 model_executor/layers/quantization/utils/w8a8_utils.py:17)."""
_library: Any = torch.library.Library("_C", "FRAGMENT")  # the names go with it

for schema in (*_LOOKED_UP, *_ASKED):
    _library.define(schema)
for schema in _ASKED:
    _library.impl(schema.partition("(")[0], lambda *_: False, "CompositeExplicitAutograd")
