"""A start on CUDA as the newest version of vLLM makes it of a config.json: defaults, layers, weights, activation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvplan.builtin.defaults import MODEL_BYTES, PACKED, assumes_a_card, filled
from kvplan.builtin.model import Model, read_model
from kvplan.builtin.weights import activation_of, check_quantization, weights_of
from kvplan.errors import PlanError, short
from kvplan.figure import Figure, ceil_div
from kvplan.flags import DEFAULT_CAPABILITY, KINDS, EngineFlags, Limits, checked
from kvplan.generations import NEWEST_TESTED, text_of
from kvplan.specs import (
    FullAttention,
    Layers,
    LayerSpec,
    MambaState,
    MlaAttention,
    SlidingWindow,
    rank_heads,
    stage_bounds,
)

_OLDEST_CAPABILITY: Final = 8
_PACKED_BYTES: Final = 656  # of one token (v1/kv_cache_interface.py)
# The flags whose other values the built-in does not plan.
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "platform": ("cuda",),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "speculative_config": (None,),
    "mamba_block_size": (None,),
    "mamba_cache_dtype": (None, "auto"),
    "mamba_ssm_cache_dtype": (None, "auto"),
    "mamba_cache_mode": (None, "none", "align"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start, as far as a config.json says; `kvplan.pool.plan_pool` makes the KV cache of it."""

    architecture: str
    layers: int  # of the whole model
    flags: EngineFlags  # with every default of the newest version filled in
    limits: Limits
    workers: Sequence[Layers]  # one rank of each pipeline stage
    weights: tuple[Figure, ...]  # of each stage, on one rank; empty: not known
    activation: Figure | None  # of the largest stage; None: not known
    why_unknown: str | None  # why the weights or the activation are not known
    has_experts: bool
    notes: tuple[str, ...]  # assumptions, in sentences
    doubts: tuple[str, ...]  # why the figures of the KV cache are not exact


def read_start(config: Mapping[str, Any], flags: EngineFlags, *, checkpoint_bytes: int | None = None) -> Start:
    """Plan a start for the contents of a config.json and the flags given; `checkpoint_bytes` are of the weights' files.

    Raises PlanError, which names key and value: the built-in does not plan it, or vLLM would refuse it.
    """
    _check(flags)
    model = read_model(config)
    check_quantization(model, flags)
    if flags.enable_expert_parallel and not model.experts:
        raise PlanError("--enable-expert-parallel: True; vLLM refuses it for a model without experts")
    notes = []
    if assumes_a_card(flags):
        card = "a card of 70 to 160 GiB, as none is named" if flags.device_bytes is None else "a card of this size"
        notes.append(
            f"--max-num-batched-tokens and --max-num-seqs: vLLM's defaults for {card}; an A100 has 2,048 and 256."
        )
    resolved = filled(model, flags)
    workers, block = worker_layers(model, resolved)
    resolved = replace(resolved, block_size=block)
    weights, activation, unknown = _memory(model, resolved, checkpoint_bytes)
    return Start(
        architecture=model.architecture,
        layers=model.layers,
        flags=resolved,
        limits=Limits.of(resolved, max_encoder_tokens=resolved.max_num_batched_tokens or 0, v2_model_runner=True),
        workers=workers,
        weights=weights,
        activation=activation,
        why_unknown="; ".join(unknown) or None,
        has_experts=model.experts > 0,
        notes=tuple(notes),
        doubts=tuple(_doubts(model, flags)),
    )


def _check(flags: EngineFlags) -> None:
    for key, values in _ONLY.items():
        if getattr(flags, key) not in values:
            right = " or ".join(str(value) for value in values if value is not None) or "without it"
            raise PlanError(
                f"--{key.replace('_', '-')}: {short(getattr(flags, key))}; the built-in plans {right} alone"
            )
    for key in KINDS:
        if (value := getattr(flags, key)) is not None:
            checked(key, value)
    capability = flags.compute_capability
    if capability is not None and not re.fullmatch(r"\d{1,2}(\.\d)?", capability):
        raise PlanError(f"--compute-capability: {capability!r}; write it as {DEFAULT_CAPABILITY}")
    if flags.compute_capability_major < _OLDEST_CAPABILITY:  # older cards change the element type
        raise PlanError(f"--compute-capability: {capability!r}; the built-in plans 8.0 and newer")


def _memory(
    model: Model, flags: EngineFlags, checkpoint_bytes: int | None
) -> tuple[tuple[Figure, ...], Figure | None, list[str]]:
    # Where nothing may be given to the encoder, it is not loaded (0.32.0, models/interfaces.py).
    counts = [(flags.limit_mm_per_prompt or {}).get(name) for name in model.family.encodes]
    encodes, unknown = any((one.get("count") if isinstance(one, Mapping) else one) != 0 for one in counts), []
    weights: tuple[Figure, ...] = ()
    activation = None
    try:
        stages = range(flags.pipeline_parallel_size)
        weights = tuple(weights_of(model, flags, stage, checkpoint_bytes, encodes=encodes) for stage in stages)
    except PlanError as exc:
        unknown.append(f"weights: {exc}")
    try:
        if encodes:
            unknown.append(
                "activation: a start profiles the encoder with its largest input, which the file does not say"
            )
        else:
            activation = activation_of(model, flags)
    except PlanError as exc:
        unknown.append(f"activation: {exc}")
    return weights, activation, unknown


def _doubts(model: Model, flags: EngineFlags) -> Iterator[str]:
    if model.dtype is None and flags.dtype in (None, "auto"):
        yield "config.json names no dtype: bfloat16 is assumed; vLLM reads it of the weights where they are."
    if model.family.keeps == "latent" and flags.compute_capability is None:
        yield f"MLA's block size depends on the card's compute capability, which is taken to be {DEFAULT_CAPABILITY}."
    if model.family.keeps == "delta" and flags.enable_prefix_caching is not False:
        # 0.33.0, model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:691 and :748
        yield (
            f"Planned as vLLM {text_of(NEWEST_TESTED)} does: 0.33 keeps one more state of a request, in blocks of"
            " multiples of 64 tokens, where FlashInfer computes the gated delta nets (Hopper)."
        )
    if assumes_a_card(flags) and any(model.windows):
        yield "Windows depend on --max-num-batched-tokens, whose default differs by card. Give it, or the card's name."


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
            if not model.is_sparse:
                return {f"{name}.self_attn.attn": latent}
            # The keys by which sparse attention picks its tokens: 8-bit elements, and a scale for each 128 of them.
            width = model.text.number("index_head_dim")
            size = width + width // 128 * 4
            indexer = MlaAttention(block_size=block, kv_heads=1, head_size=size, element_bytes=1)
            return {f"{name}.self_attn.attn": latent, f"{name}.self_attn.indexer": indexer}
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
