"""The flags that were not given, as the newest version fills them in on CUDA: types, block, length, step."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvplan.builtin.model import Model
from kvplan.errors import PlanError, short
from kvplan.figure import GIB
from kvplan.flags import DEFAULT_CAPABILITY, EngineFlags

MODEL_BYTES: Final = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_SPELLED: Final = {"half": "float16", "float": "float32"}
PACKED: Final = "fp8_ds_mla"  # the cache of sparse attention in 8 bits
# Tokens and requests of one step by the card's memory (0.32.0, engine/arg_utils.py, get_batch_defaults).
STEPS: Final = ((160 * GIB, 16384, 1024), (70 * GIB, 8192, 1024), (0, 2048, 256))
_DEFAULT_SHARE: Final = 0.92
_DEFAULT_BLOCK: Final = 16
_CACHE_TYPES: Final = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
_HOPPER, _BLACKWELL = 9, 10
_GEMMA_3: Final = "Gemma3ForConditionalGeneration"
_FLASHINFER_HEADS: Final = (64, 128, 192)  # 0.32.0, v1/attention/backends/mla/flashinfer_mla.py:245


def filled(model: Model, flags: EngineFlags) -> EngineFlags:
    """Raises PlanError: vLLM would refuse a value, or the built-in does not plan it."""
    length = model.longest if flags.max_model_len is None else flags.max_model_len
    if length > model.longest:
        raise PlanError(
            f"--max-model-len: {length}; the model allows {model.longest} ({model.length_key}), and vLLM refuses more"
            " unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set"
        )
    card = STEPS[1][0] if flags.device_bytes is None else flags.device_bytes
    if "a100" in (flags.device_name or "").lower() and card < STEPS[0][0]:
        card = 0
    tokens, requests = next((tokens, requests) for least, tokens, requests in STEPS if card >= least)
    batched = flags.max_num_batched_tokens or min((flags.max_num_seqs or requests) * length, tokens)
    requests = flags.max_num_seqs or min(requests, batched)
    if batched < requests:
        raise PlanError(f"--max-num-batched-tokens: {batched}; vLLM refuses less than --max-num-seqs, {requests}")
    own, cache = _model_type(model, flags), _cache_type(model, flags)
    # The states of a delta net have the model's type, or that of Qwen3.5's own key (models/config.py).
    state = model.text.get("mamba_ssm_dtype") if model.model_type.startswith("qwen3_5") else None
    if state not in (None, "float32", "float16", "bfloat16"):
        raise model.text.refused("mamba_ssm_dtype", "float32, float16 or bfloat16 is needed")
    is_hybrid, caches = model.family.keeps == "delta", flags.enable_prefix_caching is not False
    return replace(
        flags,
        max_model_len=length,
        max_num_batched_tokens=batched,
        max_num_seqs=requests,
        gpu_memory_utilization=flags.gpu_memory_utilization or _DEFAULT_SHARE,
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


def assumes_a_card(flags: EngineFlags) -> bool:
    """Return whether the defaults of a step are for a card that nobody named: vLLM tells an A100 by its name."""
    card, given = flags.device_bytes, (flags.max_num_batched_tokens, flags.max_num_seqs)
    return None in given and flags.device_name is None and (card is None or STEPS[1][0] <= card <= 80 * GIB)


def _model_type(model: Model, flags: EngineFlags) -> str:
    """Return the element type of weights and activation: the flag's, else the checkpoint's as vLLM serves it."""
    is_given = flags.dtype not in (None, "auto")
    dtype = str(flags.dtype) if is_given else model.dtype or "bfloat16"
    key = "--dtype" if is_given else "dtype"
    if dtype not in MODEL_BYTES:
        raise PlanError(f"{key}: {dtype[:100]!r}; one of {', '.join(MODEL_BYTES)} is needed")
    if not is_given and MODEL_BYTES[dtype] > 2:  # noqa: PLR2004 - bytes
        return "bfloat16"
    served: tuple[str, ...] = tuple(MODEL_BYTES)
    if model.model_type in ("gemma2", "gemma3_text", "glm4"):
        served = ("bfloat16", "float32", "float")
    elif model.family.keeps == "latent":  # no MLA kernel takes 32 bits
        served = ("bfloat16", "float16", "half")
    elif model.quantization or flags.quantization:
        served = ("bfloat16",) if model.quantization_method == "mxfp4" else ("bfloat16", "float16", "half")
    if dtype not in served:
        raise PlanError(f"{key}: {dtype!r}; vLLM serves this model in {' or '.join(served)}")
    return _SPELLED.get(dtype, dtype)


def _cache_type(model: Model, flags: EngineFlags) -> str:
    given = flags.kv_cache_dtype or "auto"
    if given not in _CACHE_TYPES:
        raise PlanError(f"--kv-cache-dtype: {given!r}; the built-in plans {', '.join(_CACHE_TYPES)}")
    if given == "auto":  # a quantized checkpoint may ask for one (utils/torch_utils.py, layers/attention/attention.py)
        for keys in (model.quantization, model.quantization.inside("quantization")):
            for key in (name for name, value in keys.items() if "kv_cache" in name and value):
                value, given = keys[key], "fp8"
                scheme = (value.get("num_bits"), value.get("type")) if isinstance(value, dict) else value
                if scheme not in ("FP8", (8, "float")) or model.family.keeps == "latent":
                    raise PlanError(
                        f"quantization_config.{key}: {short(value)}; name a --kv-cache-dtype to plan without it"
                    )
    is_quantized = given.startswith("fp8")
    # Kernels of their own (Triton's), which older cards have without 8-bit caches.
    has_own = model.family.keeps == "latent" or model.architecture in ("GptOssForCausalLM", _GEMMA_3)
    capability = tuple(map(int, (flags.compute_capability or DEFAULT_CAPABILITY).split(".")))
    if is_quantized and has_own and capability < (8, 9):
        raise PlanError(f"--kv-cache-dtype: {given!r}; vLLM serves this model so from compute capability 8.9 on")
    if (model.family.keeps == "latent" and given == "fp8_e5m2") or (model.is_sparse and given == "fp8_e4m3"):
        raise PlanError(f"--kv-cache-dtype: {given!r}; no kernel of vLLM's serves this model so, name fp8")
    if not model.is_sparse:
        return given
    return PACKED if is_quantized else "auto"  # models/config.py: bfloat16 is the model's own


def _block_size(model: Model, flags: EngineFlags, cache: str) -> int:
    """Return the tokens of a block, before a hybrid's grows: the attention kernel's (platforms/cuda.py)."""
    given, major = flags.block_size, flags.compute_capability_major
    if model.architecture == _GEMMA_3 and major == _BLACKWELL:
        # Its images attend to what follows, by a kernel with blocks of its own.
        raise PlanError(
            f"--compute-capability: {flags.compute_capability}; for Gemma 3 with images 10.x is not planned"
        )
    if model.family.keeps != "latent":
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
