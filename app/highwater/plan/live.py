"""What the running engine would make of other flags: its own layers sized again, its own measurements carried over.

What the KV cache's size follows from exactly is computed exactly. What only a start can measure (activation, graphs,
non-torch memory) is taken from the start that was measured, and where a flag changes it, the answer is an estimate with
bounds. A flag whose effect on the layers the running engine does not show is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from highwater.plan.errors import PlanError
from highwater.plan.flags import EngineFlags
from highwater.plan.generations import generation_of
from highwater.plan.limits import Limits
from highwater.plan.pool import Pool, plan_pool
from highwater.plan.specs import AttentionLayer, Layers, LayerSpec, MambaState, MlaAttention

Grade: TypeAlias = Literal["engine", "exact", "measured", "estimated"]
_GRADES: tuple[Grade, ...] = ("engine", "exact", "measured", "estimated")

CHANGEABLE = frozenset(
    {
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_cache_dtype",
        "tensor_parallel_size",
        "num_gpu_blocks_override",
    }
)
"""The flags whose effect follows from the running engine's layers and measurements."""
_LIMITS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override")
_DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
MAX_WORLD_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStart:
    """What one worker's start measured; None: not reported.

    Attributes:
        total_bytes: The device's memory.
        free_at_start_bytes: What of it was free when the worker began.
        requested_bytes: What utilization came to.
        weights_bytes: The weights.
        activation_bytes: The peak of the profile run, above the weights.
        available_bytes: What was left for the KV cache.
    """

    total_bytes: int | None = None
    free_at_start_bytes: int | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderBudget:
    """The encoder's side of the running engine; None: not reported.

    Attributes:
        cache_size: What the encoder cache holds, in embeddings.
        compute_budget: The embeddings of one step.
        max_tokens_per_item: The largest item of each modality.
        embedding_bytes: What the cache keeps of one embedding.
    """

    cache_size: int | None = None
    compute_budget: int | None = None
    max_tokens_per_item: Mapping[str, int]
    embedding_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEngine:
    """A running engine, as far as planning needs it.

    Attributes:
        version: vLLM's version.
        architecture: The model's class; None where not reported.
        flags: The flags that it runs with, vLLM's defaults filled in.
        limits: What else its KV cache was sized by.
        workers: Each worker's layers, pipeline stage by stage.
        starts: What each worker's start measured.
        encoder: The encoder's budget; None for a model of text.
        dtype: The model's data type, as in ``bfloat16``.
    """

    version: str
    architecture: str | None
    flags: EngineFlags
    limits: Limits
    workers: tuple[Layers, ...]
    starts: tuple[MeasuredStart, ...]
    encoder: EncoderBudget | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """The bytes for the KV cache of each worker, and how far they are known.

    Attributes:
        each: By worker.
        low: The least that the binding worker may have; None where it is known.
        high: The most.
        grade: How they are known.
        notes: Why.
    """

    each: tuple[int, ...]
    low: int | None = None
    high: int | None = None
    grade: Grade = "engine"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """The KV cache of the running engine under other flags.

    Attributes:
        flags: The flags that it was planned for.
        changed: Those of them that differ from the running engine's.
        pool: The pool.
        available: The bytes that it was planned with.
        encoder: The encoder's budget under these flags.
        notes: What else there is to know.
    """

    flags: EngineFlags
    changed: Mapping[str, Any]
    pool: Pool
    available: Bytes
    encoder: EncoderBudget | None
    notes: tuple[str, ...] = ()


def plan_live(engine: LiveEngine, asked: Mapping[str, Any]) -> LivePlan:
    """Size the KV cache of the running engine under other flags.

    Args:
        engine: The running engine.
        asked: The flags that are to be other, by the names of `EngineFlags`.

    Raises:
        PlanError: A flag cannot be planned from a running engine, or its value makes no sense; or vLLM of this version
            would refuse the layers.
    """
    changed = _changes(engine, asked)
    flags = replace(engine.flags, **changed)
    _check(flags)
    workers = _workers(engine, changed)
    limits = replace(engine.limits, **{key: value for key, value in changed.items() if key in _LIMITS})
    available = _available(engine, changed, len(workers))
    pool = plan_pool(workers, available.each, limits, generation_of(engine.version))
    return LivePlan(
        flags=flags,
        changed=changed,
        pool=pool,
        available=available,
        encoder=_encoder(engine.encoder, changed),
        notes=_notes(engine, changed),
    )


def answer_of(engine: LiveEngine, plan: LivePlan) -> dict[str, Any]:
    """Return a plan as `POST /memory/plan` answers it."""
    pool, grade = plan.pool, plan.available.grade
    derived = _worse(grade, "exact") if plan.changed else grade
    geometry: Grade = "exact"
    return {
        "schema": 1,
        "vllm_version": engine.version,
        "platform": plan.flags.platform,
        "model": {
            "architecture": engine.architecture,
            "layers": len({name for worker in engine.workers for name in worker}),
            "max_position_embeddings": None,
        },
        "flags": {field.name: getattr(plan.flags, field.name) for field in fields(plan.flags)},
        "changed": dict(plan.changed),
        "kv_cache": {
            "available_bytes": pool.available_bytes,
            "available_bytes_low": plan.available.low,
            "available_bytes_high": plan.available.high,
            "bytes_per_block": pool.bytes_per_block,
            "block_size": min(group.block_size for group in pool.groups) if pool.groups else None,
            "blocks": pool.blocks,
            "groups": [
                {
                    "kind": group.kind,
                    "layers": group.layers,
                    "padding_layers": group.padding_layers,
                    "block_size": group.block_size,
                    "page_bytes": group.page_bytes,
                    "blocks_per_request": group.blocks_per_request,
                }
                for group in pool.groups
            ],
            "tokens": pool.tokens,
            "max_concurrency": pool.max_concurrency,
            "needed_bytes": pool.needed_bytes,
            "fits": pool.fits,
            "max_model_len_that_fits": pool.max_model_len_that_fits,
            "grades": {
                "available_bytes": grade,
                "bytes_per_block": geometry,
                "block_size": geometry,
                "groups": geometry,
                "needed_bytes": geometry,
                "blocks": derived,
                "tokens": derived,
                "max_concurrency": derived,
                "fits": derived,
                "max_model_len_that_fits": derived,
            },
        },
        "encoder": _encoder_answer(plan.encoder),
        "command_line": command_line(plan.changed),
        "notes": [*plan.available.notes, *plan.notes],
    }


def command_line(changed: Mapping[str, Any], model: str = "MODEL") -> str:
    """Return the flags that are to be other, as `vllm serve` takes them; all others stay as they are."""
    words = [f"vllm serve {model}"]
    for key, value in changed.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, Mapping):
            inner = ", ".join(f'"{name}": {number}' for name, number in value.items())
            words.append(f"{flag} '{{{inner}}}'")
        else:
            words.append(f"{flag} {value}")
    return " ".join(words)


def _changes(engine: LiveEngine, asked: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(EngineFlags)}
    changed: dict[str, Any] = {}
    for key, value in asked.items():
        if key not in known:
            raise PlanError(f"{key}: there is no such key; known: {', '.join(sorted(CHANGEABLE))}")
        if value is None or value == getattr(engine.flags, key):
            continue
        if key not in CHANGEABLE:
            raise PlanError(
                f"{key}: {value!r} cannot be planned from the running engine, which does not show what it would change; "
                f"plan it from the model's config.json with `highwater plan CONFIG_OR_DIR`"
            )
        changed[key] = value
    if "kv_cache_memory_bytes" in changed and "gpu_memory_utilization" in changed:
        raise PlanError(
            f"gpu_memory_utilization: {changed['gpu_memory_utilization']!r} has no effect beside kv_cache_memory_bytes "
            f"({changed['kv_cache_memory_bytes']!r}); give one of them"
        )
    return changed


def _check(flags: EngineFlags) -> None:
    for key in (*_LIMITS, "kv_cache_memory_bytes", "tensor_parallel_size"):
        value = getattr(flags, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(f"{key}: {value!r} must be a whole number of at least 1")
    share = flags.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise PlanError(f"gpu_memory_utilization: {share!r} must be a share over 0 and up to 1")
    ranks = flags.tensor_parallel_size * flags.pipeline_parallel_size
    if ranks > MAX_WORLD_SIZE:
        raise PlanError(
            f"tensor_parallel_size: {flags.tensor_parallel_size} makes {ranks} workers; at most {MAX_WORLD_SIZE}"
        )


# --- layers ---


def _workers(engine: LiveEngine, changed: Mapping[str, Any]) -> tuple[Layers, ...]:
    workers = engine.workers
    if "kv_cache_dtype" in changed:
        size = _element_bytes(engine, changed["kv_cache_dtype"])
        workers = tuple(_mapped(layers, lambda layer: _with_elements(layer, size)) for layers in workers)
    if "tensor_parallel_size" in changed:
        old, new = engine.flags.tensor_parallel_size, changed["tensor_parallel_size"]
        stages = workers[::old]
        workers = tuple(
            layers for stage in stages for layers in [_mapped(stage, lambda layer: _with_ranks(layer, old, new))] * new
        )
    return workers


def _mapped(layers: Layers, change: Callable[[LayerSpec], LayerSpec]) -> Layers:
    return {name: change(layer) for name, layer in layers.items()}


def _element_bytes(engine: LiveEngine, dtype: str) -> int:
    name = engine.dtype if dtype == "auto" else dtype
    size = _DTYPE_BYTES.get((name or "").removeprefix("torch."))
    if size is None:
        raise PlanError(
            f"kv_cache_dtype: {dtype!r} cannot be planned from the running engine; what can: auto, "
            f"{', '.join(_DTYPE_BYTES)}"
        )
    return size


def _with_elements(layer: LayerSpec, size: int) -> LayerSpec:
    _refuse_states(layer, "kv_cache_dtype")
    if (
        not isinstance(layer, AttentionLayer)
        or layer.token_head_bytes is not None
        or layer.page_bytes_padded is not None
    ):
        raise PlanError(
            f"kv_cache_dtype: {type(layer).__name__} layers of this engine are packed or padded by a rule of their own; "
            "plan from the model's config.json with `highwater plan CONFIG_OR_DIR`"
        )
    if isinstance(layer, MlaAttention) and size == 1:
        # On CUDA some of vLLM's MLA backends pack fp8 with its scales, others do not.
        raise PlanError(
            "kv_cache_dtype: how this engine would pack the vectors of MLA in fp8 depends on its attention backend; plan "
            "from the model's config.json with `highwater plan CONFIG_OR_DIR`"
        )
    return replace(layer, element_bytes=size)


def _with_ranks(layer: LayerSpec, old: int, new: int) -> LayerSpec:
    """Return the layer on one of `new` ranks.

    vLLM divides the KV heads by the ranks, and has each rank keep one head where there are fewer heads than ranks
    (`ModelConfig.get_num_kv_heads`). More than one head on a rank therefore shows how many there are in all.
    """
    _refuse_states(layer, "tensor_parallel_size")
    if isinstance(layer, MlaAttention):
        return layer
    if not isinstance(layer, AttentionLayer) or layer.page_bytes_padded is not None:
        raise PlanError(
            f"tensor_parallel_size: {new}: the pages of {type(layer).__name__} layers of this engine are padded; plan from "
            "the model's config.json with `highwater plan CONFIG_OR_DIR`"
        )
    if layer.kv_heads == 1 and old > 1 and new < old:
        raise PlanError(
            f"tensor_parallel_size: {new}: each of the {old} ranks keeps one KV head, which may be a copy, so that their "
            "number is not known; plan from the model's config.json with `highwater plan CONFIG_OR_DIR`"
        )
    heads = layer.kv_heads * old
    if layer.kv_heads == 1 and old > 1:
        return layer  # as many heads as ranks at most: more ranks keep one each
    if heads > new and heads % new:
        raise PlanError(f"tensor_parallel_size: {new} must divide the {heads} KV heads of the model")
    if new > heads and new % heads:
        raise PlanError(f"tensor_parallel_size: {new} must be a multiple of the {heads} KV heads of the model")
    return replace(layer, kv_heads=max(1, heads // new))


def _refuse_states(layer: LayerSpec, key: str) -> None:
    if isinstance(layer, MambaState):
        raise PlanError(
            f"{key}: the blocks of a model with states (Mamba, linear attention) are aligned anew when it changes; plan "
            "from the model's config.json with `highwater plan CONFIG_OR_DIR`"
        )


# --- bytes ---


def _available(engine: LiveEngine, changed: Mapping[str, Any], workers: int) -> Bytes:
    if "kv_cache_memory_bytes" in changed:
        given = changed["kv_cache_memory_bytes"]
        note = "vLLM takes kv_cache_memory_bytes as given: whether the rest leaves room for them is not checked."
        return Bytes(each=(given,) * workers, grade="exact", notes=(note,))
    if engine.flags.kv_cache_memory_bytes is not None and "gpu_memory_utilization" not in changed:
        return Bytes(each=_of_ranks(engine, workers), grade="engine" if workers == len(engine.workers) else "exact")
    return _measured(engine, changed, workers)


def _measured(engine: LiveEngine, changed: Mapping[str, Any], workers: int) -> Bytes:
    """Return the measured bytes, corrected for what the flags change."""
    each = list(_of_ranks(engine, workers))
    starts = [engine.starts[min(rank, len(engine.starts) - 1)] for rank in range(workers)]
    notes: list[str] = []
    grade: Grade = "engine"
    if "gpu_memory_utilization" in changed:
        share = changed["gpu_memory_utilization"]
        each = [size + _gain(start, share) for size, start in zip(each, starts, strict=True)]
        grade = "measured"
        notes.append("Weights, activation, graphs and non-torch memory are those of the running engine's start.")
    low = high = None
    if "tensor_parallel_size" in changed:
        ratio = engine.flags.tensor_parallel_size / changed["tensor_parallel_size"]
        weights = min(_needed(start.weights_bytes, "tensor_parallel_size", "weights_bytes") for start in starts)
        freed = round(weights * (1 - ratio))
        # Norms and other small layers are on every rank: a little less than their share is freed.
        low, high = min(each) + min(0, freed), min(each) + max(0, freed)
        each = [size + freed for size in each]
        grade = "estimated"
        notes.append(
            "The weights of a rank are estimated by the ranks' ratio; activation, graphs and the buffers of the collective "
            "library, which differ as well, are the running engine's."
        )
    growth = _activation_growth(engine, changed)
    if growth is not None:
        least, most = growth
        activation = max(start.activation_bytes or 0 for start in starts)
        if any(start.activation_bytes is None for start in starts):
            notes.append("The start did not report its peak of activation, which these flags change: not counted.")
        base_low, base_high = low if low is not None else min(each), high if high is not None else min(each)
        low, high = base_low - round(activation * (most - 1)), base_high - round(activation * (least - 1))
        tokens = changed.get("max_num_batched_tokens", engine.flags.max_num_batched_tokens) or 1
        ratio = tokens / (engine.limits.max_num_batched_tokens or 1)
        each = [size - round(activation * max(0.0, ratio - 1)) for size in each]
        grade = "estimated"
        notes.append(
            f"The peak of activation was measured with {engine.limits.max_num_batched_tokens} batched tokens and "
            f"{engine.limits.max_num_seqs} sequences; it is taken to grow with the tokens at most in proportion, and not "
            "to shrink with fewer."
        )
    each = [max(0, size) for size in each]
    return Bytes(
        each=tuple(each),
        low=None if low is None else max(0, low),
        high=None if high is None else max(0, high),
        grade=grade,
        notes=tuple(notes),
    )


def _of_ranks(engine: LiveEngine, workers: int) -> tuple[int, ...]:
    """Return the measured bytes of each worker; those of the smallest for workers that there are not yet."""
    sizes = [start.available_bytes for start in engine.starts]
    return tuple(sizes) if len(sizes) == workers else (min(sizes),) * workers


def _gain(start: MeasuredStart, share: float) -> int:
    total = _needed(start.total_bytes, "gpu_memory_utilization", "total_bytes")
    requested = _needed(start.requested_bytes, "gpu_memory_utilization", "requested_bytes")
    wanted = math.ceil(total * share)
    if start.free_at_start_bytes is not None and wanted > start.free_at_start_bytes:
        most = math.floor(100 * start.free_at_start_bytes / total) / 100
        raise PlanError(
            f"gpu_memory_utilization: {share} asks for {wanted} bytes, and {start.free_at_start_bytes} were free when the "
            f"engine started: vLLM refuses to start; at most {most} fits beside what else is on the device"
        )
    return wanted - requested


def _activation_growth(engine: LiveEngine, changed: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return by what factors the peak of activation may change, least and most; None where no flag changes it."""
    ratios = [
        changed[key] / (getattr(engine.limits, key) or 1)
        for key in ("max_num_batched_tokens", "max_num_seqs")
        if key in changed
    ]
    return (min(1.0, *ratios), max(1.0, *ratios)) if ratios else None


def _needed(value: int | None, key: str, name: str) -> int:
    if value is None:
        raise PlanError(f"{key}: cannot be planned from this engine, whose start reported no {name}")
    return value


# --- encoder, notes ---


def _encoder(encoder: EncoderBudget | None, changed: Mapping[str, Any]) -> EncoderBudget | None:
    tokens = changed.get("max_num_batched_tokens")
    if encoder is None or tokens is None:
        return encoder
    # max(max_num_batched_tokens, the largest item): `compute_mm_encoder_budget`, vllm/v1/core/encoder_cache_manager.py.
    budget = max([tokens, *encoder.max_tokens_per_item.values()])
    return replace(encoder, cache_size=budget, compute_budget=budget)


def _encoder_answer(encoder: EncoderBudget | None) -> dict[str, Any] | None:
    if encoder is None:
        return None
    size, width = encoder.cache_size, encoder.embedding_bytes
    return {
        "cache_embeddings": size,
        "compute_embeddings": encoder.compute_budget,
        "cache_bytes": None if size is None or width is None else size * width,
        "items": {
            modality: {"max_embeddings": tokens, "cached": None if size is None else size // tokens if tokens else None}
            for modality, tokens in encoder.max_tokens_per_item.items()
        },
    }


def _notes(engine: LiveEngine, changed: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    length = changed.get("max_model_len")
    if length is not None and length > engine.limits.max_model_len:
        notes.append(
            "vLLM refuses a max_model_len over what the model's config.json allows, which is not checked here."
        )
    if "kv_cache_dtype" in changed:
        notes.append("Whether the attention backend of this engine supports that kv_cache_dtype is not checked here.")
    if engine.flags.num_gpu_blocks_override is not None:
        notes.append("num_gpu_blocks_override is set: the number of blocks does not follow from the bytes.")
    return tuple(notes)


def _worse(*grades: Grade) -> Grade:
    return max(grades, key=_GRADES.index)


def slowest(starts: Sequence[MeasuredStart]) -> MeasuredStart:
    """Return the start that left the least for the KV cache: that of the worker that binds."""
    return min(starts, key=lambda start: start.available_bytes)
