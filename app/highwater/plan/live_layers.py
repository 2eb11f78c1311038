"""The running engine's own layers under other flags; a flag whose effect they do not show is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from highwater.plan.kv_view import OFFLINE, LiveEngine
from kvplan.errors import PlanError, short
from kvplan.ranks import rank_heads
from kvplan.specs import AttentionLayer, Layers, LayerSpec, MambaState, MlaAttention

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def layers_under(engine: LiveEngine, changed: Mapping[str, Any]) -> tuple[Layers, ...]:
    """Return the layers of each worker where some flags, by the names of `EngineFlags`, are changed.

    Raises PlanError: the running engine does not show what a flag changes; the message names it.
    """
    workers = engine.layers
    if "max_model_len" in changed:
        workers = _all(workers, lambda layer: _with_length(layer, engine, changed["max_model_len"]))
    if "kv_cache_dtype" in changed:
        size = _element_bytes(engine, changed["kv_cache_dtype"])
        workers = _all(workers, lambda layer: _with_elements(layer, size))
    if "tensor_parallel_size" in changed:
        old, new = engine.flags.tensor_parallel_size, changed["tensor_parallel_size"]
        split = _all(workers[::old], lambda layer: _with_ranks(layer, old, new))
        workers = tuple(stage for stage in split for _ in range(new))
    return workers


def _all(workers: tuple[Layers, ...], change: Callable[[LayerSpec], LayerSpec]) -> tuple[Layers, ...]:
    return tuple({name: change(layer) for name, layer in layers.items()} for layers in workers)


def _with_length(layer: LayerSpec, engine: LiveEngine, length: int) -> LayerSpec:
    """Return the layer at another maximum length, which is the block of a state that is kept once a request."""
    if not isinstance(layer, MambaState) or layer.block_size != engine.limits.max_model_len:
        return layer
    return replace(layer, block_size=length)


def _element_bytes(engine: LiveEngine, dtype: object) -> int:
    name = engine.flags.dtype if dtype == "auto" else dtype
    if name not in _DTYPE_BYTES:
        raise PlanError(
            f"kv_cache_dtype: {short(dtype)} cannot be planned from the running engine; known: auto, "
            f"{', '.join(_DTYPE_BYTES)}"
        )
    return _DTYPE_BYTES[str(name)]


def _with_elements(layer: LayerSpec, size: int) -> LayerSpec:
    attention = _plain_attention(layer, "kv_cache_dtype")
    if isinstance(attention, MlaAttention):
        raise PlanError(f"kv_cache_dtype: the attention backend decides how the vectors of MLA are packed; {OFFLINE}")
    return replace(attention, element_bytes=size)


def _with_ranks(layer: LayerSpec, old: int, new: int) -> LayerSpec:
    """Return the layer on one of `new` ranks.

    vLLM divides the KV heads by the ranks, and has each rank keep one where there are fewer heads than ranks
    (vllm 0.32.0 config/model.py, `get_num_kv_heads`). More than one on a rank therefore shows how many there are.
    """
    attention = _plain_attention(layer, "tensor_parallel_size")
    if isinstance(attention, MlaAttention):
        return attention  # every rank keeps the whole vector
    if attention.kv_heads == 1 and old > 1:
        if new < old:
            raise PlanError(
                f"tensor_parallel_size: {new}: each of the {old} ranks keeps one KV head, which may be a copy of "
                f"another's, so that their number is not seen there; {OFFLINE}"
            )
        return attention
    return replace(attention, kv_heads=rank_heads(attention.kv_heads * old, new, "tensor_parallel_size"))


def _plain_attention(layer: LayerSpec, key: str) -> AttentionLayer:
    if not isinstance(layer, AttentionLayer):
        raise PlanError(
            f"{key}: the blocks of a model with states (Mamba, linear attention) are aligned anew when it changes, "
            f"which is not seen in the running engine; {OFFLINE}"
        )
    if layer.token_head_bytes is not None or layer.page_bytes_padded is not None:
        raise PlanError(f"{key}: the pages of this engine are packed or padded by a rule that depends on it; {OFFLINE}")
    return layer
