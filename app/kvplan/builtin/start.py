"""A start on CUDA as the newest version of vLLM makes it of a config.json: defaults, layers, weights, activation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvplan.builtin.activation import activation_of
from kvplan.builtin.defaults import assumes_a_card, filled
from kvplan.builtin.layers import worker_layers
from kvplan.builtin.model import Model, read_model
from kvplan.builtin.weights import check_quantization, weights_of
from kvplan.errors import PlanError, short
from kvplan.figure import Figure
from kvplan.flags import DEFAULT_CAPABILITY, EngineFlags
from kvplan.limits import Limits
from kvplan.specs import Layers
from kvplan.versions import NEWEST_TESTED, text_of

_MAX_NUMBER: Final = 1 << 60
_OLDEST_CAPABILITY: Final = 8
_WHOLE_NUMBERS: Final = (
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes", "device_bytes"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("decode_context_parallel_size", "prefill_context_parallel_size", "block_size", "num_gpu_blocks_override"),
)
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
    notes = list(_notes(flags))
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
    for key in _WHOLE_NUMBERS:
        value = getattr(flags, key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_NUMBER
        ):
            raise PlanError(f"--{key.replace('_', '-')}: {value!r}; a whole number from 1 to {_MAX_NUMBER} is needed")
    share, capability = flags.gpu_memory_utilization, flags.compute_capability
    if share is not None and not 0 < share <= 1:
        raise PlanError(f"--gpu-memory-utilization: {share!r}; more than 0, and 1 at most, is needed")
    if capability is not None and not re.fullmatch(r"\d{1,2}(\.\d)?", capability):
        raise PlanError(f"--compute-capability: {capability!r}; write it as {DEFAULT_CAPABILITY}")
    if flags.compute_capability_major < _OLDEST_CAPABILITY:  # older cards change the element type
        raise PlanError(f"--compute-capability: {capability!r}; the built-in plans 8.0 and newer")


def _is_left_out(names: Sequence[str], limits: Mapping[str, Any] | None) -> bool:
    """Return whether nothing may be given to the encoder, so that it is not loaded (0.32.0, models/interfaces.py)."""
    counts = [(limits or {}).get(name) for name in names]
    return all((one.get("count") if isinstance(one, Mapping) else one) == 0 for one in counts)


def _memory(
    model: Model, flags: EngineFlags, checkpoint_bytes: int | None
) -> tuple[tuple[Figure, ...], Figure | None, list[str]]:
    """Return weights and activation as far as they are known, and why not."""
    encodes, unknown = not _is_left_out(model.family.encodes, flags.limit_mm_per_prompt), []
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


def _notes(flags: EngineFlags) -> Iterator[str]:
    if assumes_a_card(flags):
        card = "a card of 70 to 160 GiB, as none is named" if flags.device_bytes is None else "a card of this size"
        yield f"--max-num-batched-tokens and --max-num-seqs: vLLM's defaults for {card}; an A100 has 2,048 and 256."


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
