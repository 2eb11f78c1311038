"""The layers of each worker: the caches of a model as a version's specs, for one rank of each pipeline stage."""

from __future__ import annotations

from typing import Any

from highwater.plan import ascend
from highwater.plan.models.elements import PACKED_LATENT_BYTES
from highwater.plan.models.kept import Attention, Cross, Indexer, Kept, Latent, Model, RecurrentState
from highwater.plan.resolve import Resolved
from kvplan.generations import Generation
from kvplan.ranks import rank_heads, stage_bounds
from kvplan.specs import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Layers,
    LayerSpec,
    MambaState,
    MlaAttention,
    SlidingWindow,
)


def worker_layers(
    model: Model, resolved: Resolved, generation: Generation, drafts: tuple[Kept, ...] = ()
) -> list[Layers]:
    """Return the layers of one rank of each pipeline stage, whose ranks are alike; a drafter's are on the last."""
    stages = resolved.flags.pipeline_parallel_size
    bounds = stage_bounds(model.layers, stages)
    workers = [
        {kept.name: _spec(kept, resolved, generation) for kept in model.kept if start <= kept.layer < end}
        for start, end in bounds
    ]
    workers[-1] |= {kept.name: _spec(kept, resolved, generation) for kept in drafts}
    return list(workers)


def _spec(kept: Kept, resolved: Resolved, generation: Generation) -> LayerSpec:
    elements, blocks = resolved.elements, resolved.blocks
    ranks = resolved.flags.tensor_parallel_size
    match kept:
        case Attention():
            return _attention(kept, resolved)
        case Latent():
            return MlaAttention(
                block_size=blocks.attention,
                kv_heads=1,
                head_size=kept.width,
                element_bytes=elements.cache_bytes,
                token_head_bytes=PACKED_LATENT_BYTES if elements.cache == "fp8_ds_mla" else None,
                cache_dtype=elements.cache,
            )
        case Indexer():
            return MlaAttention(block_size=blocks.attention, kv_heads=1, head_size=kept.width_bytes, element_bytes=1)
        case Cross():
            return CrossAttention(
                block_size=blocks.attention,
                kv_heads=rank_heads(kept.kv_heads, ranks),
                head_size=kept.head_size,
                element_bytes=elements.cache_bytes,
            )
        case RecurrentState():
            return MambaState(
                block_size=blocks.state,
                page_bytes_padded=blocks.state_page_bytes,
                shapes=kept.form.shapes(ranks, resolved.speculative_tokens),
                element_bytes=tuple(elements.role_bytes(role) for role in kept.form.roles),
                speculative_blocks=resolved.speculative_tokens,
                checkpoint_blocks=int(generation.mamba2_checkpoints and kept.form.keeps_checkpoints),
            )
        case _:
            raise AssertionError(kept)


def _attention(kept: Attention, resolved: Resolved) -> LayerSpec:
    geometry: dict[str, Any] = {
        "block_size": resolved.blocks.attention,
        "kv_heads": rank_heads(kept.kv_heads, resolved.flags.tensor_parallel_size),
        "head_size": kept.head_size,
        "element_bytes": resolved.elements.cache_bytes,
        "token_head_bytes": resolved.elements.token_head_bytes(kept.head_size),
    }
    if kept.window is not None:
        if resolved.flags.platform == "ascend" and resolved.release in ascend.KEEPS_SLIDING_AS_FULL:
            return FullAttention(window=kept.window, **geometry)
        return SlidingWindow(window=kept.window, **geometry)
    if kept.chunk is not None:
        return ChunkedLocal(chunk=kept.chunk, **geometry)
    return FullAttention(**geometry)
