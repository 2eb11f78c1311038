"""The layers of each worker as vLLM's specs have them: element types, block sizes, states, pipeline stages."""

from __future__ import annotations

from typing import Any, Final

from kvplan.builtin.model import MODEL_BYTES, Model
from kvplan.errors import PlanError
from kvplan.figure import ceil_div
from kvplan.flags import EngineFlags
from kvplan.ranks import rank_heads, stage_bounds
from kvplan.specs import FullAttention, Layers, LayerSpec, MambaState, MlaAttention, SlidingWindow

DEFAULT_BLOCK: Final = 16
_CACHE_TYPES: Final = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
_STATE_TYPES: Final = ("auto", "float32", "float16", "bfloat16")
# The packed latent vector of sparse attention in 8 bits (v1/kv_cache_interface.py).
_PACKED: Final = "fp8_ds_mla"
_PACKED_BYTES: Final = 656
_HOPPER, _BLACKWELL = 9, 10


def cache_type(model: Model, flags: EngineFlags) -> str:
    """Return the KV cache's element type as vLLM names it. Raises PlanError: the built-in does not plan it."""
    given = flags.kv_cache_dtype or "auto"
    if given not in _CACHE_TYPES:
        raise PlanError(f"--kv-cache-dtype: {given!r}; the built-in plans {', '.join(_CACHE_TYPES)}")
    if given == "auto":
        given = _stored_type(model)
    if not model.is_sparse:
        return given
    if given.startswith("fp8"):
        if flags.compute_capability_major != _HOPPER:
            raise PlanError(f"--kv-cache-dtype: {given!r}; for sparse MLA the built-in plans it on Hopper alone")
        return _PACKED
    return "auto"  # models/config.py: bfloat16 is the model's own


def _stored_type(model: Model) -> str:
    """Return the type that a quantized checkpoint asks for (utils/torch_utils.py, layers/attention/attention.py)."""
    asked = {key: value for key in model.quantization if "kv_cache" in key and (value := model.quantization.get(key))}
    inner = model.quantization.inside("quantization")
    asked |= {key: value for key in inner if "kv_cache" in key and (value := inner.get(key))}
    for key, value in asked.items():
        scheme = (value.get("num_bits"), value.get("type")) if isinstance(value, dict) else value
        is_fp8 = scheme in ("FP8", (8, "float"))
        if not is_fp8 or model.family.keeps == "latent":
            raise PlanError(f"quantization_config.{key}: the cache that it asks for {_UNPLANNED}")
    method = (model.quantization_method or "").replace("_", "-")
    return "auto" if not asked else "fp8_e4m3" if method.startswith("modelopt") else "fp8"


_UNPLANNED: Final = "is not planned by the built-in; name a --kv-cache-dtype"


def model_type(model: Model, flags: EngineFlags) -> str:
    """Return the element type of weights and activation: the flag's, else the checkpoint's as vLLM serves it."""
    given = flags.dtype if flags.dtype not in (None, "auto") else model.dtype or "bfloat16"
    if given not in MODEL_BYTES:
        raise PlanError(f"dtype: {given!r}; one of {', '.join(MODEL_BYTES)} is needed")
    return "bfloat16" if flags.dtype in (None, "auto") and given in ("float32", "float") else given


def state_types(model: Model, flags: EngineFlags) -> tuple[str, str]:
    """Return the element types of the convolution's states and of the delta net's."""
    for key in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        if (getattr(flags, key) or "auto") not in _STATE_TYPES:
            flag = key.replace("_", "-")
            raise PlanError(f"--{flag}: {getattr(flags, key)!r}; must be one of {', '.join(_STATE_TYPES)}")
    own = model_type(model, flags)
    convolution = own if flags.mamba_cache_dtype in (None, "auto") else flags.mamba_cache_dtype
    state = flags.mamba_ssm_cache_dtype or "auto"
    if state == "auto" and model.model_type.startswith("qwen3_5"):  # models/config.py: its own key decides
        state = str(model.text.get("mamba_ssm_dtype") or "auto")
        if state not in _STATE_TYPES:
            raise model.text.refused("mamba_ssm_dtype", f"one of {', '.join(_STATE_TYPES)} is needed")
    return convolution, convolution if state == "auto" else state


def block_size(model: Model, flags: EngineFlags) -> int:
    """Return the tokens of a block, before a hybrid's grows: the attention kernel's (platforms/cuda.py)."""
    given, major = flags.block_size, flags.compute_capability_major
    if model.family.keeps != "latent":
        if given is not None and given % DEFAULT_BLOCK:
            raise PlanError(f"--block-size: {given}; attention kernels take multiples of {DEFAULT_BLOCK}")
        return given or DEFAULT_BLOCK
    if given is not None or major not in (8, _HOPPER, _BLACKWELL) or (model.is_sparse and major < _HOPPER):
        what = f"--block-size: {given}" if given is not None else f"--compute-capability: {flags.compute_capability}"
        raise PlanError(f"{what}; for MLA the built-in plans the block of its kernels on 8.x, 9.0 and 10.0")
    if model.is_sparse:
        return 64  # FlashMLA's
    if major == _BLACKWELL:  # FlashInfer's, else CUTLASS's
        return 32 if model.text.optional("qk_nope_head_dim") == 128 else 128  # noqa: PLR2004 - its one head size
    # FlashAttention's MLA takes 16 and no 8-bit cache; FlashMLA takes one.
    return 64 if major == _HOPPER and cache_type(model, flags).startswith("fp8") else DEFAULT_BLOCK


def worker_layers(model: Model, flags: EngineFlags) -> tuple[list[Layers], int]:
    """Return the layers of one rank of each pipeline stage, and the block size that vLLM ends up with.

    `flags` have vLLM's defaults filled in. Raises PlanError: vLLM cannot divide the model by its ranks.
    """
    ranks, cache = flags.tensor_parallel_size, cache_type(model, flags)
    if model.heads % ranks:
        raise PlanError(f"--tensor-parallel-size: {ranks}; it must divide the model's {model.heads} attention heads")
    element = MODEL_BYTES.get(model_type(model, flags) if cache == "auto" else cache, 1)
    block = block_size(model, flags)
    state = _state(model, flags) if model.family.keeps == "delta" else None
    kv_heads = rank_heads(model.kv_heads, ranks)
    if state is not None:
        token = 2 * kv_heads * model.head_size * element
        # As many tokens as make a page that holds a state (platforms/interface.py, _align_hybrid_block_size).
        block = max(block, block * ceil_div(state.content_bytes, block * token))
    geometry: dict[str, Any] = {"block_size": block, "head_size": model.head_size, "element_bytes": element}

    def kept(layer: int) -> dict[str, LayerSpec]:
        name = f"model.layers.{layer}"
        if model.linear[layer] and state is not None:
            return {f"{name}.linear_attn": _aligned(state, block, block * token, flags)}
        if model.family.keeps == "latent":
            packed = _PACKED_BYTES if cache == _PACKED else None
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
    elements = tuple(MODEL_BYTES[name] for name in state_types(model, flags))
    return MambaState(block_size=1, shapes=shapes, element_bytes=elements)


def _aligned(state: MambaState, block: int, page: int, flags: EngineFlags) -> MambaState:
    """Return a state whose page is an attention layer's; with prefix caching it stands for as many tokens."""
    tokens = block if flags.enable_prefix_caching else flags.max_model_len or 0
    padded = None if page == state.content_bytes else page
    return MambaState(
        block_size=tokens, page_bytes_padded=padded, shapes=state.shapes, element_bytes=state.element_bytes
    )
