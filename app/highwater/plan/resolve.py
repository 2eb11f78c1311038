"""The flags that were not given, filled in as a version of vLLM fills them in for a model and a platform.

The sources: vllm/engine/arg_utils.py (get_batch_defaults, _set_default_*), vllm/config/{model,scheduler,cache,vllm}.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from highwater.plan.models.blocks import Blocks, block_sizes
from highwater.plan.models.drafts import speculative_object
from highwater.plan.models.elements import Elements, resolve_elements
from highwater.plan.models.kept import Model
from highwater.units import GIB
from kvplan.errors import PlanError
from kvplan.flags import DEFAULT_CAPABILITY, EngineFlags
from kvplan.generations import Generation
from kvplan.limits import Limits
from kvplan.versions import Release

# Cards from here on get larger steps; A100 is left out by name, which a plan does not know.
LARGE_CARD_BYTES: Final = 70 * GIB
LARGEST_CARD_BYTES: Final = 160 * GIB
_A100_BYTES: Final = 80 * GIB  # the larger of the two A100
SMALL_STEP: Final = (2048, 256)  # tokens and requests, of smaller cards and an A100
_MAX_NUMBER: Final = 1 << 60
ALLOW_LONG: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The flags of a plan, none left open."""

    given: EngineFlags
    # Every flag with the value that vLLM would use; `gpu_memory_utilization` is None where the bytes of the KV
    # cache were given.
    flags: EngineFlags
    assumes_a_card: bool  # the defaults of one step are for a card that nobody named
    release: Release
    limits: Limits
    elements: Elements
    blocks: Blocks
    speculative_tokens: int  # the tokens of a draft; 0: no drafter
    # Why the figures are not exact: a default that was assumed, or a rule of that version that is not settled here.
    doubts: tuple[str, ...]
    notes: tuple[str, ...]  # assumptions, in sentences


def resolve(flags: EngineFlags, model: Model, generation: Generation, *, speculative_tokens: int = 0) -> Resolved:
    """Raises PlanError: vLLM of this version would refuse a flag, or its value makes no sense."""
    _check(flags, model)
    notes: list[str] = []
    length = _length(flags, model)
    prefix = _prefix_caching(flags, model, generation)
    batched, requests = _batch(flags, model, generation, length, notes)
    mode = _cache_mode(flags, model, generation, prefix=prefix)
    elements = resolve_elements(model, generation, flags)
    blocks = block_sizes(
        model,
        flags,
        generation,
        elements,
        max_model_len=length,
        mamba_cache_mode=mode,
        speculative=speculative_tokens,
    )
    filled = replace(
        flags,
        max_model_len=length,
        max_num_batched_tokens=batched,
        max_num_seqs=requests,
        gpu_memory_utilization=None if flags.kv_cache_memory_bytes is not None else share_of(flags, generation),
        dtype=elements.model,
        kv_cache_dtype=elements.cache,
        block_size=blocks.attention,
        enable_prefix_caching=prefix,
        async_scheduling=_async(flags, generation),
        disable_hybrid_kv_cache_manager=not _hybrid_manager(flags, model, generation),
        mamba_cache_dtype=elements.convolution,
        mamba_ssm_cache_dtype=elements.state,
        mamba_block_size=blocks.state,
        mamba_cache_mode=mode,
    )
    v2_model_runner = _second_runner(flags, model, generation)
    if flags.platform == "ascend" and flags.block_size not in (None, blocks.attention):
        why = "to hold this model's states" if model.is_hybrid else "as chunked prefill is on"
        notes.append(f"--block-size: {flags.block_size}; vllm-ascend makes it {blocks.attention}, {why}.")
    doubts = tuple(f"Not exact: {doubt}" for doubt in _doubts(flags, model, generation))
    return Resolved(
        given=flags,
        flags=filled,
        assumes_a_card=_assumes_a_card(flags),
        release=generation.release,
        limits=Limits.of(
            filled,
            # What cross attention is sized for (config/scheduler.py, max_num_encoder_input_tokens).
            max_encoder_tokens=model.encoder_tokens if generation.release < (0, 13, 0) else batched,
            v2_model_runner=v2_model_runner,
        ),
        elements=elements,
        blocks=blocks,
        speculative_tokens=speculative_tokens,
        doubts=doubts,
        notes=(*notes, *doubts),
    )


def _doubts(flags: EngineFlags, model: Model, generation: Generation) -> Iterator[str]:
    """Yield what the KV cache's figures rest on that nobody gave, or that is not settled here for this version."""
    if generation.note:
        yield generation.note
    if model.dtype is None and flags.dtype in (None, "auto"):
        yield "config.json names no dtype: bfloat16 is assumed; vLLM reads it of the weights where they are."
    if model.is_latent and flags.platform == "cuda" and not (flags.block_size or flags.compute_capability):
        yield f"MLA's block size depends on --compute-capability, which is taken to be {DEFAULT_CAPABILITY}."
    if model.is_latent and flags.platform == "cpu":
        yield "the block size is that of a CPU without AMX; with it, 128 or what is asked for."
    if model.model_type.startswith("mimo_v2") and generation.release >= (0, 16, 0):
        yield "values are planned as wide as keys, and newer versions keep MiMo's narrower ones."
    windows = any(getattr(one, key, None) for one in model.kept for key in ("window", "chunk"))
    if _assumes_a_card(flags) and (windows or model.is_encoder_decoder or speculative_method(flags)):
        yield (
            "windows, drafters and cross attention depend on --max-num-batched-tokens and --max-num-seqs, whose"
            " defaults differ by card. Give both."
        )


def _assumes_a_card(flags: EngineFlags) -> bool:
    """Return whether defaults of one step are for a card that nobody named: vLLM goes by the name, a plan by size."""
    card, given = flags.device_bytes, (flags.max_num_batched_tokens, flags.max_num_seqs)
    is_open = card is None or LARGE_CARD_BYTES <= card <= _A100_BYTES
    return flags.platform == "cuda" and None in given and is_open


_WHOLE_NUMBERS: Final = (
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes"),
    *("device_bytes", "in_use_bytes"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("decode_context_parallel_size", "prefill_context_parallel_size"),
    *("block_size", "num_gpu_blocks_override", "mamba_block_size"),
)


def _check(flags: EngineFlags, model: Model) -> None:
    for key in _WHOLE_NUMBERS:
        value = getattr(flags, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(f"--{key.replace('_', '-')}: {value!r}; a whole number of 1 or more is needed")
        if value is not None and value > _MAX_NUMBER:
            flag = {"device_bytes": "device", "in_use_bytes": "in-use"}.get(key, key.replace("_", "-"))
            raise PlanError(f"--{flag}: {value!r}; {_MAX_NUMBER} at most")
    share = flags.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise PlanError(f"--gpu-memory-utilization: {share!r}; more than 0, and 1 at most, is needed")
    if flags.compute_capability is not None and not re.fullmatch(r"\d{1,2}(\.\d)?", flags.compute_capability):
        raise PlanError(f"--compute-capability: {flags.compute_capability!r}; write it as 9.0")
    if flags.block_size is not None and flags.platform != "cpu" and flags.block_size % 16:
        raise PlanError(f"--block-size: {flags.block_size}; attention kernels take multiples of 16")
    _check_ranks(flags, model)


def _check_ranks(flags: EngineFlags, model: Model) -> None:
    ranks, stages = flags.tensor_parallel_size, flags.pipeline_parallel_size
    if model.attention_heads % ranks:
        raise PlanError(
            f"--tensor-parallel-size: {ranks}; the model's {model.attention_heads} attention heads must be divisible"
            " by it, vLLM refuses to start"
        )
    context = flags.decode_context_parallel_size
    # vllm 0.32.0 config/parallel.py and config/model.py: its ranks are tensor-parallel ranks, and hold the same heads.
    most = ranks if model.is_latent or not model.kv_heads else ranks // model.kv_heads
    if flags.prefill_context_parallel_size == 1 and context > 1 and (ranks % context or context > most):
        least = "" if most == ranks else f" and at least {context} times the {model.kv_heads} KV heads"
        raise PlanError(
            f"--decode-context-parallel-size: {context}; vLLM refuses it: --tensor-parallel-size, {ranks}, must be a"
            f" multiple of it{least}"
        )
    if stages > model.layers:
        raise PlanError(f"--pipeline-parallel-size: {stages}; the model has {model.layers} layers")
    if stages > 1 and model.is_encoder_decoder:
        raise PlanError(f"--pipeline-parallel-size: {stages}; vLLM does not spread this model over stages, use 1")


def _length(flags: EngineFlags, model: Model) -> int:
    """Follow _get_and_verify_max_len (config/model.py)."""
    given = flags.max_model_len
    longest = model.length.longest
    if given is None:
        return model.length.default
    if longest is None or given <= longest or given <= (model.length.override or 0):
        return given
    raise PlanError(
        f"--max-model-len: {given}; the model allows {int(longest)} ({model.length.key}), and vLLM refuses more unless"
        f" {ALLOW_LONG} is set"
    )


def _batch(flags: EngineFlags, model: Model, generation: Generation, length: int, notes: list[str]) -> tuple[int, int]:
    tokens, requests = _batch_defaults(flags, generation)
    if _assumes_a_card(flags):
        values = {"--max-num-batched-tokens": flags.max_num_batched_tokens, "--max-num-seqs": flags.max_num_seqs}
        names = " and ".join(flag for flag, value in values.items() if value is None)
        card = "a card of 70 to 160 GiB, as none is named" if flags.device_bytes is None else "a card of this size"
        notes.append(f"{names}: vLLM's default for {card}; an A100 has 2,048 and 256.")
    # Encoder-decoders have no chunked prefill: a step must hold a whole prompt.
    chunked = not model.is_encoder_decoder
    batched = flags.max_num_batched_tokens
    seats = requests if flags.max_num_seqs is None else flags.max_num_seqs
    if batched is None:
        batched = min(seats * length, tokens if chunked else max(length, tokens))
    if flags.max_num_seqs is None:
        seats = min(seats, batched)
    if batched < seats:
        raise PlanError(f"--max-num-batched-tokens: {batched}; vLLM refuses less than --max-num-seqs, which is {seats}")
    if not chunked and batched < length:
        raise PlanError(f"--max-num-batched-tokens: {batched}; this model needs at least its length, {length}")
    return batched, seats


def _batch_defaults(flags: EngineFlags, generation: Generation) -> tuple[int, int]:
    """Tokens and requests of one step, of `vllm serve` (arg_utils.py, get_batch_defaults)."""
    if flags.platform == "cpu":
        ranks = flags.tensor_parallel_size * flags.pipeline_parallel_size
        return 2048 * ranks, 128 * ranks
    card = flags.device_bytes
    if card is None:
        card = LARGE_CARD_BYTES if flags.platform == "cuda" else 0
    if card >= LARGEST_CARD_BYTES and generation.release >= (0, 28, 0):
        return 16384, 1024
    return (8192, 1024) if card >= LARGE_CARD_BYTES else SMALL_STEP


def _prefix_caching(flags: EngineFlags, model: Model, generation: Generation) -> bool:
    """Follow is_prefix_caching_supported: on by default, but for the kinds of models that it lists."""
    if model.is_encoder_decoder:
        return False
    if flags.enable_prefix_caching is None:
        hybrid = not model.is_hybrid or generation.release >= (0, 28, 0)
        context = flags.prefill_context_parallel_size == 1 or generation.release >= (0, 13, 0)
        return model.has_attention and hybrid and context
    # models/config.py: up to 0.14 models whose states cannot be cached lose it again.
    recurrent = model.is_hybrid or not model.has_attention
    loses = recurrent and not model.caches_states and generation.release < (0, 15, 0)
    return flags.enable_prefix_caching and not loses


def _cache_mode(flags: EngineFlags, model: Model, generation: Generation, *, prefix: bool) -> str:
    """Follow MambaModelConfig: which states are kept where prefix caching is on."""
    given = flags.mamba_cache_mode
    known = ("none", "align", "all") if generation.mamba_has_all else ("none", "align")
    if given is not None and given not in known:
        raise PlanError(f"--mamba-cache-mode: {given!r}; vLLM {generation.version} takes one of {', '.join(known)}")
    if not prefix or not (model.is_hybrid or not model.has_attention):
        return "none"
    if generation.release < (0, 15, 0):
        return "all"  # the only mode, before it had a name
    can_all = model.caches_states and generation.mamba_has_all
    if given in (None, "none"):
        return "all" if can_all and generation.release < (0, 28, 0) else "align"
    return "all" if given == "all" and can_all else "align"


def _async(flags: EngineFlags, generation: Generation) -> bool:
    if flags.async_scheduling is not None:
        return flags.async_scheduling and flags.platform != "cpu"
    if flags.platform != "cuda" or generation.release < (0, 14, 0):
        return False
    method = str(speculative_method(flags) or "")
    return not method or "mtp" in method or method.startswith("eagle")


def _second_runner(flags: EngineFlags, model: Model, generation: Generation) -> bool:
    """Return whether the second model runner is the default (config/vllm.py, _is_default_v2_model_runner_model)."""
    has_states = model.is_hybrid or not model.has_attention
    is_plain = generation.release >= (0, 26, 0) and not model.is_moe and not has_states
    return flags.platform == "cuda" and (is_plain or generation.release >= (0, 29, 0))


def _hybrid_manager(flags: EngineFlags, model: Model, generation: Generation) -> bool:
    if flags.disable_hybrid_kv_cache_manager:
        return False
    # Chunked local attention was kept whole by default up to 0.13 (envs.py).
    chunked = any(getattr(one, "chunk", None) is not None for one in model.kept)
    return not (chunked and (generation.release < (0, 14, 0) or speculative_method(flags) is not None))


def share_of(flags: EngineFlags, generation: Generation) -> float:
    """Return the share of the card that a start asks for, whatever sizes its KV cache."""
    default = 0.92 if generation.release >= (0, 20, 0) else 0.9
    return default if flags.gpu_memory_utilization is None else flags.gpu_memory_utilization


def speculative_method(flags: EngineFlags) -> str | None:
    if flags.speculative_config is None:
        return None
    given = speculative_object(flags.speculative_config)
    method = given.get("method")
    return None if method is None and not given else str(method or "draft_model")
