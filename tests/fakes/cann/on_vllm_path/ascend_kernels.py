"""What vllm-ascend calls beside torch's operators, computed on the CPU: CANN's fused operators, and Triton's kernels.

Written after torch_npu's documentation and vllm-ascend's calls, for what the tests run and no more: Qwen3-VL, eager,
without quantisation, on one device. Answers follow from every image and token; they were compared with no device's.
vLLM calls `register` in every process of an engine, as it does with plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from cpu_kernels import KEY, computed, seen_by_cpu, stand_in
from torch.nn import functional

# torch is not where this file is checked: its values have no types here.
Tensor: TypeAlias = Any
_libraries: list[Any] = []  # a kernel goes with its library


def register() -> None:
    """Put the stand-ins in place, before vllm-ascend's worker is imported."""
    import torch_npu  # noqa: PLC0415 - not before torch has registered its kernels
    from torch_npu.op_plugin.atb import _atb_ops  # noqa: PLC0415 - as that

    # Of another of CANN's libraries; only the warm-up calls one.
    _atb_ops._register_atb_extensions = lambda: None
    torch_npu._npu_matmul_add_fp32 = lambda *_: None
    for compute in FUSED:
        stand_in(compute.__name__, compute)
    for schema, compute in OPERATORS.items():
        _define(schema, compute)
    from vllm_ascend.ops.triton import compute_slot_mapping  # noqa: PLC0415 - it wants these operators

    compute_slot_mapping._compute_slot_mapping_kernel = SlotMapping()


def _define(schema: str, compute: Callable[..., Any]) -> None:
    """Register an operator that there would be with Triton, or with vllm-ascend's compiled part."""
    namespace, _, declared = schema.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    library.impl(library.define(declared), computed(compute), KEY)


# --- attention ---


def npu_fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Attend, sequence by sequence; layout TND: tokens of all sequences, heads, numbers of a head."""
    assert given["input_layout"] == "TND"
    table, is_causal = given.get("block_table"), given.get("sparse_mode") == 3
    ends_kv = given["actual_seq_lengths_kv"]
    output = torch.zeros_like(query)
    for row, (start, end) in enumerate(pairwise([0, *given["actual_seq_lengths"]])):
        if table is None:  # lengths are sums, of keys too
            here = slice(ends_kv[row - 1] if row else 0, ends_kv[row])
            keys, values = key[here], value[here]
        else:
            keys, values = (_of_blocks(cache, table[row], ends_kv[row]) for cache in (key, value))
        output[start:end] = _attended(query[start:end], keys, values, given["scale"], is_causal=is_causal)
    return output, torch.zeros(1)


def _of_blocks(cache: Tensor, blocks: Tensor, tokens: int) -> Tensor:
    """Return the first tokens of a sequence, from a cache of shape [blocks, tokens of a block, ...]."""
    block_size = cache.shape[1]
    return cache[blocks[: -(-tokens // block_size)].long()].flatten(0, 1)[:tokens]


def _attended(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    heads, width = query.shape[1:]
    key, value = (
        one.reshape(len(one), -1, width).repeat_interleave(heads * width // one[0].numel(), 1) for one in (key, value)
    )
    # The queries are the last tokens. Without a mask torch need not make what is a number for each pair of an image's.
    mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query)) if is_causal else None
    query, key, value = (one.float().transpose(0, 1) for one in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(0, 1)


def npu_scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **_: Any
) -> None:
    """Write tokens into their places of the cache; a negative one has none."""
    kept = slot_mapping >= 0
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slot_mapping[kept].long()] = new[: len(kept)][kept].to(cache.dtype)


class SlotMapping:
    """The kernel that gives each token its place in the KV cache; begun as Triton's are, `kernel[grid](...)`."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def compute(*given: Any, PAD_ID: int, **_: Any) -> None:  # noqa: N803 - the kernel's own name
            tokens, max_tokens, starts, positions, table, _stride, block_size, slots = given
            starts, positions, table, slots = map(seen_by_cpu, (starts, positions, table, slots))
            slots[tokens:max_tokens] = PAD_ID
            for row, (start, end) in enumerate(pairwise(starts[: grid[0]].tolist())):
                place = positions[start:end]
                slots[start:end] = table[row, place // block_size] * block_size + place % block_size

        return compute


# --- positions ---


def triton_split_qkv_rmsnorm_mrope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split, normalise and rotate; `cos_sin` has a row for time, height and width each, their numbers interleaved."""
    from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope  # noqa: PLC0415 - not before the rest of vLLM

    heads, kv_heads, head_size, eps, mrope_section = given[:5]
    query, key, value = qkv.split([number * head_size for number in (heads, kv_heads, kv_heads)], dim=-1)
    cos, sin = (apply_interleaved_rope(one, list(mrope_section)) for one in cos_sin.float().chunk(2, dim=-1))
    query, key = (
        _rotated(npu_rms_norm(one.unflatten(-1, (-1, head_size)), weight, eps)[0], cos, sin).flatten(1)
        for one, weight in ((query, q_weight), (key, k_weight))
    )
    return query, key, value.contiguous(), qkv.new_empty(len(qkv), 0)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head, [tokens, heads, numbers]; cosines [tokens, half of the numbers]."""
    one, two = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)


def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-two, one), dim=-1) * sin).to(x.dtype)


# --- norms and activations ---


def npu_rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale * weight.float()).to(x.dtype), scale


def npu_add_rms_norm_bias(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    normal, scale = npu_rms_norm(x + residual, weight, epsilon)
    return normal if bias is None else normal + bias, scale, x + residual


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return functional.silu(gate) * up


FUSED = (npu_fused_infer_attention_score, npu_scatter_pa_kv_cache, npu_rotary_mul, npu_rms_norm, npu_swiglu)
"""Of torch_npu."""
OPERATORS: dict[str, Callable[..., Any]] = {
    "_C_ascend::device_print(str text) -> ()": lambda _: None,
    "_C_ascend::device_print_tensor(Tensor value) -> ()": lambda _: None,
    "_C_ascend::npu_add_rms_norm_bias(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float epsilon)"
    " -> (Tensor, Tensor, Tensor)": npu_add_rms_norm_bias,
    "vllm::triton_split_qkv_rmsnorm_mrope(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, "
    "int num_q_heads, int num_kv_heads, int head_size, float eps, int[] mrope_section, bool is_interleaved, "
    "int? rope_dim=None, Tensor? q_bias=None, Tensor? k_bias=None, bool has_gate=False)"
    " -> (Tensor, Tensor, Tensor, Tensor)": triton_split_qkv_rmsnorm_mrope,
}
"""By schema, as vllm-ascend declares them."""
