"""The layers of each worker as vLLM's specs have them, for one rank of each pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from kvplan.builtin.defaults import MODEL_BYTES, PACKED
from kvplan.builtin.model import Model
from kvplan.errors import PlanError
from kvplan.figure import ceil_div
from kvplan.flags import EngineFlags
from kvplan.ranks import rank_heads, stage_bounds
from kvplan.specs import FullAttention, Layers, LayerSpec, MambaState, MlaAttention, SlidingWindow

_PACKED_BYTES: Final = 656  # of one token (v1/kv_cache_interface.py)


def worker_layers(model: Model, flags: EngineFlags) -> tuple[list[Layers], int]:
    """Return the layers of one rank of each pipeline stage, and the block size that vLLM ends up with.

    `flags` have vLLM's defaults filled in. Raises PlanError: vLLM cannot divide the model by its ranks.
    """
    ranks, cache = flags.tensor_parallel_size, flags.kv_cache_dtype or ""
    inner = "moe_intermediate_size" if model.experts else "intermediate_size"
    for key in ("num_attention_heads", *(() if flags.enable_expert_parallel else (inner,))):
        if (model.text.optional(key) or 0) % ranks:
            raise PlanError(f"--tensor-parallel-size: {ranks}; it must divide {key}, which is {model.text.get(key)}")
    element = MODEL_BYTES.get((flags.dtype or "") if cache == "auto" else cache, 1)
    block = flags.block_size or 0
    state = _state(model, flags) if model.family.keeps == "delta" else None
    kv_heads = rank_heads(model.kv_heads, ranks)
    if state is not None:
        token = 2 * kv_heads * model.head_size * element
        # As many tokens as make a page that holds a state (platforms/interface.py, _align_hybrid_block_size).
        block *= ceil_div(state.content_bytes, block * token)
        # With prefix caching a state stands for as many tokens; its page is as large as an attention layer's.
        tokens, page = block if flags.enable_prefix_caching else flags.max_model_len or 0, block * token
        state = replace(state, block_size=tokens, page_bytes_padded=None if page == state.content_bytes else page)
    geometry: dict[str, Any] = {"block_size": block, "head_size": model.head_size, "element_bytes": element}

    def kept(layer: int) -> dict[str, LayerSpec]:
        name = f"model.layers.{layer}"
        if model.linear[layer] and state is not None:
            return {f"{name}.linear_attn": state}
        if model.family.keeps == "latent":
            packed = _PACKED_BYTES if cache == PACKED else None
            latent = MlaAttention(kv_heads=1, token_head_bytes=packed, cache_dtype=cache, **geometry)
            return {f"{name}.self_attn.attn": latent, **_indexer(model, name, block)}
        window = model.windows[layer]
        if window is None:
            return {f"{name}.self_attn.attn": FullAttention(kv_heads=kv_heads, **geometry)}
        return {f"{name}.self_attn.attn": SlidingWindow(kv_heads=kv_heads, window=window, **geometry)}

    stages = flags.pipeline_parallel_size
    if stages > model.layers:
        raise PlanError(f"--pipeline-parallel-size: {stages}; the model has {model.layers} layers")
    return [
        {name: spec for layer in range(*bounds) for name, spec in kept(layer).items()}
        for bounds in stage_bounds(model.layers, stages)
    ], block


def _indexer(model: Model, name: str, block: int) -> dict[str, LayerSpec]:
    """Return the keys by which sparse attention picks its tokens: 8-bit elements, and a scale for each 128 of them."""
    if not model.is_sparse:
        return {}
    width = model.text.number("index_head_dim")
    size = width + width // 128 * 4
    return {f"{name}.self_attn.indexer": MlaAttention(block_size=block, kv_heads=1, head_size=size, element_bytes=1)}


def _state(model: Model, flags: EngineFlags) -> MambaState:
    """Return a gated delta net's state on one rank (mamba_utils.py, gated_delta_net_state_shape)."""
    text, ranks = model.text, flags.tensor_parallel_size
    keys, values = text.number("linear_num_key_heads"), text.number("linear_num_value_heads")
    key, value = text.number("linear_key_head_dim"), text.number("linear_value_head_dim")
    for name, heads in (("linear_num_key_heads", keys), ("linear_num_value_heads", values)):
        if heads % ranks:
            raise PlanError(f"--tensor-parallel-size: {ranks}; it must divide {name}, which is {heads}")
    width = (2 * key * keys + value * values) // ranks
    shapes = (text.number("linear_conv_kernel_dim") - 1, width), (values // ranks, value, key)
    elements = tuple(MODEL_BYTES[name or ""] for name in (flags.mamba_cache_dtype, flags.mamba_ssm_cache_dtype))
    return MambaState(block_size=1, shapes=shapes, element_bytes=elements)
