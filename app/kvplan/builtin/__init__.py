"""A start on CUDA as the newest version of vLLM makes it of a config.json: defaults, layers, weights, activation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvplan import (
    DEFAULT_CAPABILITY,
    FLAG_KINDS,
    GIB,
    EngineFlags,
    Figure,
    Limits,
    PlanError,
    ceil_div,
    checked_flag,
    short,
)
from kvplan.builtin.model import MODEL_BYTES, Model, read_model
from kvplan.builtin.weights import activation_of, check_quantization, weights_of
from kvplan.generations import DEFAULT_UTILIZATION, NEWEST_TESTED, text_of
from kvplan.specs import (
    CACHE_BYTES,
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
_SPELLED: Final = {"half": "float16", "float": "float32"}
_PACKED: Final = "fp8_ds_mla"  # the cache of sparse attention in 8 bits
# Tokens and requests of one step by the card's memory (0.32.0, engine/arg_utils.py, get_batch_defaults).
_STEPS: Final = ((160 * GIB, 16384, 1024), (70 * GIB, 8192, 1024), (0, 2048, 256))
_DEFAULT_BLOCK: Final = 16
_HOPPER, _BLACKWELL = 9, 10
_GEMMA_3: Final = "Gemma3ForConditionalGeneration"
_FLASHINFER_HEADS: Final = (64, 128, 192)  # 0.32.0, v1/attention/backends/mla/flashinfer_mla.py:245
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
    encodes: tuple[str, ...]  # what the model takes beside text
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
    if _assumes_a_card(flags):
        card = "a card of 70 to 160 GiB, as none is named" if flags.device_bytes is None else "a card of this size"
        notes.append(
            f"--max-num-batched-tokens and --max-num-seqs: vLLM's defaults for {card}; an A100 has 2,048 and 256."
        )
    resolved = _filled(model, flags)
    workers, block = _worker_layers(model, resolved)
    resolved = replace(resolved, block_size=block)
    weights, activation, unknown = _memory(model, resolved, checkpoint_bytes)
    doubts = []
    if model.dtype is None and flags.dtype in (None, "auto"):
        doubts.append("config.json names no dtype: bfloat16 is assumed; vLLM reads it of the weights where they are.")
    if model.family.mixer == "latent" and flags.compute_capability is None:
        doubts.append(
            f"MLA's block size depends on the card's compute capability, which is taken to be {DEFAULT_CAPABILITY}."
        )
    if model.family.mixer == "delta" and flags.enable_prefix_caching is not False:
        # 0.33.0, model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:691 and :748
        doubts.append(
            f"Planned as vLLM {text_of(NEWEST_TESTED)} does: 0.33 keeps one more state of a request, in blocks of"
            " multiples of 64 tokens, where FlashInfer computes the gated delta nets (Hopper)."
        )
    if _assumes_a_card(flags) and any(model.windows):
        doubts.append(
            "Windows depend on --max-num-batched-tokens, whose default differs by card. Give it, or the card's name."
        )
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
        encodes=model.family.encodes,
        notes=tuple(notes),
        doubts=tuple(doubts),
    )


def _check(flags: EngineFlags) -> None:
    for key, values in _ONLY.items():
        if getattr(flags, key) not in values:
            right = " or ".join(str(value) for value in values if value is not None) or "without it"
            raise PlanError(
                f"--{key.replace('_', '-')}: {short(getattr(flags, key))}; the built-in plans {right} alone"
            )
    for key in FLAG_KINDS:
        if (value := getattr(flags, key)) is not None:
            checked_flag(key, value)
    capability = flags.compute_capability
    if capability is not None and not re.fullmatch(r"\d{1,2}(\.\d)?", capability):
        raise PlanError(f"--compute-capability: {capability!r}; write it as {DEFAULT_CAPABILITY}")
    if flags.capability[0] < _OLDEST_CAPABILITY:  # older cards change the element type
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


# --- the flags that were not given, as the newest version fills them in on CUDA ---


def _filled(model: Model, flags: EngineFlags) -> EngineFlags:
    """Raises PlanError: vLLM would refuse a value, or the built-in does not plan it."""
    length = model.longest if flags.max_model_len is None else flags.max_model_len
    if length > model.longest:
        raise PlanError(
            f"--max-model-len: {length}; the model allows {model.longest} ({model.length_key}), and vLLM refuses more"
            " unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set"
        )
    card = _STEPS[1][0] if flags.device_bytes is None else flags.device_bytes
    if "a100" in (flags.device_name or "").lower() and card < _STEPS[0][0]:
        card = 0
    tokens, requests = next((tokens, requests) for least, tokens, requests in _STEPS if card >= least)
    batched = flags.max_num_batched_tokens or min((flags.max_num_seqs or requests) * length, tokens)
    requests = flags.max_num_seqs or min(requests, batched)
    if batched < requests:
        raise PlanError(f"--max-num-batched-tokens: {batched}; vLLM refuses less than --max-num-seqs, {requests}")
    own, cache = _model_type(model, flags), _cache_type(model, flags)
    # The states of a delta net have the model's type, or that of Qwen3.5's own key (models/config.py).
    state = model.text.get("mamba_ssm_dtype") if model.model_type.startswith("qwen3_5") else None
    if state not in (None, "float32", "float16", "bfloat16"):
        raise model.text.refused("mamba_ssm_dtype", "float32, float16 or bfloat16 is needed")
    is_hybrid, caches = model.family.mixer == "delta", flags.enable_prefix_caching is not False
    return replace(
        flags,
        max_model_len=length,
        max_num_batched_tokens=batched,
        max_num_seqs=requests,
        gpu_memory_utilization=flags.gpu_memory_utilization or DEFAULT_UTILIZATION,
        dtype=own,
        kv_cache_dtype=cache,
        block_size=_block_size(model, flags, cache),
        enable_prefix_caching=caches,
        async_scheduling=flags.async_scheduling is not False,
        mamba_cache_dtype=own,
        mamba_ssm_cache_dtype=str(state or own),
        # MambaModelConfig (models/config.py): the only mode with prefix caching, whatever is asked for.
        mamba_cache_mode="align" if is_hybrid and caches else "none",
    )


def _assumes_a_card(flags: EngineFlags) -> bool:
    """Return whether the defaults of a step are for a card that nobody named: vLLM tells an A100 by its name."""
    card, given = flags.device_bytes, (flags.max_num_batched_tokens, flags.max_num_seqs)
    return None in given and flags.device_name is None and (card is None or _STEPS[1][0] <= card <= 80 * GIB)


def _model_type(model: Model, flags: EngineFlags) -> str:
    """Return the element type of weights and activation: the flag's, else the checkpoint's as vLLM serves it."""
    is_given = flags.dtype not in (None, "auto")
    dtype = str(flags.dtype) if is_given else model.dtype or "bfloat16"
    key = "--dtype" if is_given else "dtype"
    if dtype not in MODEL_BYTES:
        raise PlanError(f"{key}: {short(dtype)}; one of {', '.join(MODEL_BYTES)} is needed")
    if not is_given and MODEL_BYTES[dtype] > 2:  # noqa: PLR2004 - bytes
        return "bfloat16"
    served: tuple[str, ...] = tuple(MODEL_BYTES)
    if model.model_type in ("gemma2", "gemma3_text", "glm4"):
        served = ("bfloat16", "float32", "float")
    elif model.family.mixer == "latent":  # no MLA kernel takes 32 bits
        served = ("bfloat16", "float16", "half")
    elif model.quantization or flags.quantization:
        served = ("bfloat16",) if model.quantization_method == "mxfp4" else ("bfloat16", "float16", "half")
    if dtype not in served:
        raise PlanError(f"{key}: {dtype!r}; vLLM serves this model in {' or '.join(served)}")
    return _SPELLED.get(dtype, dtype)


def _cache_type(model: Model, flags: EngineFlags) -> str:
    given = flags.kv_cache_dtype or "auto"
    if given != "auto" and given not in CACHE_BYTES:
        raise PlanError(f"--kv-cache-dtype: {given!r}; the built-in plans auto, {', '.join(CACHE_BYTES)}")
    if given == "auto":  # a quantized checkpoint may ask for one (utils/torch_utils.py, layers/attention/attention.py)
        for keys in (model.quantization, model.quantization.inside("quantization")):
            for key in (name for name, value in keys.items() if "kv_cache" in name and value):
                value, given = keys[key], "fp8"
                scheme = (value.get("num_bits"), value.get("type")) if isinstance(value, dict) else value
                if scheme not in ("FP8", (8, "float")) or model.family.mixer == "latent":
                    raise PlanError(
                        f"quantization_config.{key}: {short(value)}; name a --kv-cache-dtype to plan without it"
                    )
    is_quantized = given.startswith("fp8")
    # Kernels of their own (Triton's), which older cards have without 8-bit caches.
    has_own = model.family.mixer == "latent" or model.architecture in ("GptOssForCausalLM", _GEMMA_3)
    if is_quantized and has_own and flags.capability < (8, 9):
        raise PlanError(f"--kv-cache-dtype: {given!r}; vLLM serves this model so from compute capability 8.9 on")
    if (model.family.mixer == "latent" and given == "fp8_e5m2") or (model.is_sparse and given == "fp8_e4m3"):
        raise PlanError(f"--kv-cache-dtype: {given!r}; no kernel of vLLM's serves this model so, name fp8")
    if not model.is_sparse:
        return given
    return _PACKED if is_quantized else "auto"  # models/config.py: bfloat16 is the model's own


def _block_size(model: Model, flags: EngineFlags, cache: str) -> int:
    """Return the tokens of a block, before a hybrid's grows: the attention kernel's (platforms/cuda.py)."""
    given, major = flags.block_size, flags.capability[0]
    if model.architecture == _GEMMA_3 and major == _BLACKWELL:
        # Its images attend to what follows, by a kernel with blocks of its own.
        raise PlanError(
            f"--compute-capability: {flags.compute_capability}; for Gemma 3 with images 10.x is not planned"
        )
    if model.family.mixer != "latent":
        if given is not None and given % _DEFAULT_BLOCK:
            raise PlanError(f"--block-size: {given}; attention kernels take multiples of {_DEFAULT_BLOCK}")
        return given or _DEFAULT_BLOCK
    if given is not None:
        raise PlanError(f"--block-size: {given}; for MLA the built-in plans the kernels' own alone")
    if major not in ((_HOPPER,) if model.is_sparse else (8, _HOPPER, _BLACKWELL)):
        known = "9.0 with an indexer" if model.is_sparse else "8.x, 9.0 and 10.0"
        raise PlanError(f"--compute-capability: {flags.compute_capability}; for MLA the built-in plans {known}")
    if model.is_sparse:
        return 64  # FlashMLA's
    if major == _BLACKWELL:
        if model.text.optional("qk_nope_head_dim") not in _FLASHINFER_HEADS:
            raise model.text.refused("qk_nope_head_dim", f"on 10.0 the built-in plans {_FLASHINFER_HEADS} alone")
        return 32
    # FlashAttention's MLA takes 16 and no 8-bit cache; FlashMLA takes one.
    return 64 if major == _HOPPER and cache.startswith("fp8") else _DEFAULT_BLOCK


# --- layers ---


def _worker_layers(model: Model, flags: EngineFlags) -> tuple[list[Layers], int]:
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
    state = _state(model, flags) if model.family.mixer == "delta" else None
    kv_heads = rank_heads(model.kv_heads, ranks)
    if state is not None:
        token = 2 * kv_heads * model.head_size * element
        # As many tokens as make a page that holds a state (platforms/interface.py, _align_hybrid_block_size).
        block *= ceil_div(state.content_bytes, block * token)
        # With prefix caching a state stands for as many tokens; its page is as large as an attention layer's.
        tokens, page = block if flags.enable_prefix_caching else flags.max_model_len or 0, block * token
        state = replace(state, block_size=tokens, page_bytes_padded=None if page == state.content_bytes else page)
    geometry: dict[str, Any] = {"block_size": block, "head_size": model.head_size, "element_bytes": element}

    def specs_of(layer: int) -> dict[str, LayerSpec]:
        name = f"model.layers.{layer}"
        if model.linear[layer] and state is not None:
            return {f"{name}.linear_attn": state}
        if model.family.mixer == "latent":
            packed = _PACKED_BYTES if cache == _PACKED else None
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
        {name: spec for layer in range(*bounds) for name, spec in specs_of(layer).items()}
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
