"""A running engine as planning needs it: its own layers, bytes, limits and flags, from the reports of its workers.

Layers are taken field by field from vLLM's own descriptions. A kind of layer that is not known, or whose size is not
what its fields come to, is refused by name: a plan is never a guess.

Pure; no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeGuard, TypeVar

from highwater.model.engine_budget import EngineBudget, EngineLimits
from highwater.model.rank import RankReading
from kvplan import EngineFlags, Limits, PlanError, short
from kvplan.specs import (
    CACHE_BYTES,
    AttentionLayer,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Layers,
    LayerSpec,
    MambaState,
    MlaAttention,
    SlidingWindow,
    rank_heads,
)

MAX_LAYERS = 4096
_Value = TypeVar("_Value", int, str)
# The way out where a running engine does not show what a flag changes.
OFFLINE = "ask vLLM itself: `highwater plan -- vllm serve MODEL ...`"
# vLLM's kinds of attention, each with its layer, and the fields of that by vLLM's names.
_ATTENTION_KINDS: Mapping[str, tuple[type[AttentionLayer], Mapping[str, str]]] = {
    "MLAAttentionSpec": (MlaAttention, {}),
    "FullAttentionSpec": (FullAttention, {"window": "sliding_window", "chunk": "attention_chunk_size"}),
    "SlidingWindowSpec": (SlidingWindow, {"window": "sliding_window"}),
    "ChunkedLocalAttentionSpec": (ChunkedLocal, {"chunk": "attention_chunk_size"}),
    "CrossAttentionSpec": (CrossAttention, {}),
}
_PARALLEL_SIZES = tuple(field.name for field in fields(EngineFlags) if field.name.endswith("_parallel_size"))


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """One worker: its rank as it stands, and its report of the start."""

    reading: RankReading
    budget: EngineBudget

    @property
    def name(self) -> str:
        return self.reading.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEngine:
    layers: tuple[Layers, ...]  # of each worker
    available_bytes: tuple[int, ...]  # for the KV cache of each worker, as its profile returned them
    limits: Limits
    flags: EngineFlags  # as far as its workers show them
    version: str
    workers: tuple[LiveWorker, ...]  # the workers with their measured start

    @property
    def layers_are_grouped(self) -> bool:
        """True if a worker reports the layers of the engine's groups, whose block and page sizes may be padded."""
        reported = (worker.budget.kv_cache.layers for worker in self.workers)
        return any(layers is not None and layers.are_grouped for layers in reported)


def live_engine(workers: Sequence[LiveWorker]) -> LiveEngine:
    """Return the engine of all workers of one data-parallel engine, in the order of their ranks.

    Raises PlanError: a figure that a plan needs is not reported, or not understood; names the rank and the figure.
    """
    if not workers:
        raise PlanError("no worker has reported its start yet: recorders, or the worker extension, are needed")
    layers = tuple(layers_of(worker) for worker in workers)
    what = "the bytes for its KV cache (available_kv_cache_memory_bytes)"
    available = tuple(_reported(available_bytes(worker.budget), what, worker) for worker in workers)
    first, budget, kv = workers[0], workers[0].budget, workers[0].budget.kv_cache
    device = first.reading.device
    if (platform := device.traits.platform) is None:
        where = f"runs on {device.type}" if device.type else "does not name its device"
        raise PlanError(f"{first.name} {where}: how vLLM counts memory there is not known, so that nothing is planned")
    limits = budget.limits or EngineLimits()
    parallel: dict[str, Any] = {name: budget.parallel.get(name) or 1 for name in _PARALLEL_SIZES}
    flags = EngineFlags(
        platform=platform,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        kv_cache_memory_bytes=kv.given_bytes,
        gpu_memory_utilization=budget.memory.utilization,
        device_bytes=budget.memory.total_bytes or first.reading.total_bytes,
        dtype=None if budget.dtype is None else budget.dtype.removeprefix("torch."),
        kv_cache_dtype=kv.cache_dtype,
        block_size=kv.block_size,
        num_gpu_blocks_override=kv.blocks_override,
        enable_prefix_caching=kv.prefix_caching,
        async_scheduling=limits.async_scheduling,
        disable_hybrid_kv_cache_manager=limits.hybrid_manager is False,
        mamba_cache_mode=kv.mamba_cache_mode,
        **parallel,
    )
    version = _reported(budget.vllm_version, "vLLM's version (vllm.__version__)", first)
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
        _reported(getattr(flags, name), name, first)
    sized = Limits.of(flags, max_encoder_tokens=limits.max_encoder_tokens or 0, v2_model_runner=bool(limits.v2_runner))
    return LiveEngine(
        layers=layers, available_bytes=available, limits=sized, flags=flags, version=version, workers=tuple(workers)
    )


def available_bytes(budget: EngineBudget) -> int | None:
    """Return the bytes that the engine was given for the KV cache; ``None``: not reported."""
    memory, kv = budget.memory, budget.kv_cache
    known = (memory.returned_bytes, kv.given_bytes, memory.available_bytes, kv.cpu_space_bytes)
    return next((size for size in known if size is not None), None)


def layers_of(worker: LiveWorker) -> Layers:
    """Return a worker's layers, in the model's order.

    Workers report no names: those made here are shared by the ranks of a pipeline stage, and not between stages. Raises
    PlanError: the worker reports no layers, too many, or one of an unknown kind.
    """
    described = worker.budget.kv_cache.layers
    if described is None:
        raise PlanError(f"{worker.name} does not report the layers of its KV cache (get_kv_cache_spec)")
    kinds = [layer_of(kind, worker.name) for kind in described.kinds]
    if not all(0 <= kind < len(kinds) and count > 0 for kind, count in described.runs):
        raise PlanError(f"{worker.name} reports a layer of a kind that it does not describe")
    if (number := sum(count for _, count in described.runs)) > MAX_LAYERS:
        raise PlanError(f"{worker.name} reports {number} layers; {MAX_LAYERS} are more than any model has")
    order = [kinds[kind] for kind, count in described.runs for _ in range(count)]
    stage = worker.reading.pp_rank or 0
    return {f"stages.{stage}.layers.{number}": layer for number, layer in enumerate(order)}


def layer_of(described: Mapping[str, Any], name: str = "a worker") -> LayerSpec:
    """Return the layer that vLLM describes by its class as ``kind``, and its fields.

    Raises PlanError: the kind is not known, a field is missing, or its size is not what the fields come to; names the
    rank `name`.
    """
    kind = str(described.get("kind"))
    who = f"{name} reports a layer of kind {kind}"
    layer = _mamba(described, who) if kind == "MambaSpec" else _attention(described, kind, who)
    page = described.get("page_bytes")
    if layer.page_bytes < max(layer.content_bytes, 1):
        raise PlanError(f"{who} whose page of {layer.page_bytes} bytes does not hold it")
    if isinstance(page, int) and page != layer.page_bytes:
        raise PlanError(
            f"{who} whose page takes {page} bytes; its fields come to {layer.page_bytes}: this format of the cache is "
            "not known"
        )
    return layer


def _attention(described: Mapping[str, Any], kind: str, who: str) -> AttentionLayer:
    if kind not in _ATTENTION_KINDS:
        raise PlanError(f"{who}, which is not known: the KV cache is shown, not planned")
    spec_class, named = _ATTENTION_KINDS[kind]
    block, heads, head, element = (
        _field(described, field, who) for field in ("block_size", "num_kv_heads", "head_size", "dtype_bytes")
    )
    value, page, padded = (described.get(field) for field in ("head_size_v", "page_bytes", "page_size_padded"))
    value = 0 if spec_class is MlaAttention else value if isinstance(value, int) else None
    packed, width = None, head + (head if value is None else value)
    if isinstance(page, int) and not isinstance(padded, int) and page != block * heads * width * element:
        # Packed formats, scales beside the values, compressed tokens: the bytes of one token and head are exact all
        # the same where the page is a multiple of them.
        packed = page // (block * heads) if page % (block * heads) == 0 else None
    own: dict[str, Any]
    if spec_class is FullAttention:  # a window or chunk of a layer that is kept whole
        own = {field: _count(described, name) or None for field, name in named.items()}
    else:
        own = {field: _field(described, name, who) for field, name in named.items()}
    if spec_class is MlaAttention and isinstance(described.get("cache_dtype_str"), str):
        own["cache_dtype"] = described["cache_dtype_str"]
    return spec_class(
        block_size=block,
        kv_heads=heads,
        head_size=head,
        head_size_v=value,
        element_bytes=element,
        token_head_bytes=packed,
        page_bytes_padded=padded if type(padded) is int else None,
        indexes_by_block_stride=bool(described.get("indexes_kv_by_block_stride")),
        **own,
    )


def _mamba(described: Mapping[str, Any], who: str) -> MambaState:
    shapes, sizes = described.get("shapes"), described.get("dtypes_bytes")
    if not _are_sizes(sizes) or not isinstance(shapes, list | tuple) or not all(map(_are_sizes, shapes)):
        raise PlanError(f"{who} without its shapes and data types")
    if len(shapes) != len(sizes):
        raise PlanError(f"{who} with {len(shapes)} shapes and {len(sizes)} data types")
    padded = described.get("page_size_padded")
    return MambaState(
        block_size=_field(described, "block_size", who),
        page_bytes_padded=padded if type(padded) is int else None,
        shapes=tuple(map(tuple, shapes)),
        element_bytes=tuple(sizes),
        speculative_blocks=_count(described, "num_speculative_blocks"),
        checkpoint_blocks=_count(described, "num_prefill_checkpoint_blocks"),
    )


def _are_sizes(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list | tuple) and all(type(size) is int and size > 0 for size in value)


def _count(described: Mapping[str, Any], field: str) -> int:
    value = described.get(field)
    return value if type(value) is int and value > 0 else 0


def _field(described: Mapping[str, Any], field: str, who: str) -> int:
    if number := _count(described, field):
        return number
    raise PlanError(f"{who} with {field} {described.get(field)!r}; a number above 0 is needed")


def _reported(value: _Value | None, what: str, worker: LiveWorker) -> _Value:
    if value is None:
        raise PlanError(f"{worker.name} does not report {what}")
    return value


# --- The running engine's own layers under other flags; a flag whose effect they do not show is refused by name ---


def layers_under(engine: LiveEngine, changed: Mapping[str, Any]) -> tuple[Layers, ...]:
    """Return the layers of each worker where some flags, by the names of `EngineFlags`, are changed.

    Raises PlanError: the running engine does not show what a flag changes; the message names it.
    """
    length, dtype = changed.get("max_model_len"), changed.get("kv_cache_dtype")
    named = engine.flags.dtype if dtype == "auto" else dtype
    if dtype is not None and named not in CACHE_BYTES:
        raise PlanError(
            f"kv_cache_dtype: {short(dtype)} cannot be planned from the running engine; known: auto, "
            f"{', '.join(CACHE_BYTES)}"
        )
    old = engine.flags.tensor_parallel_size
    new = changed.get("tensor_parallel_size", old)

    def under(layer: LayerSpec) -> LayerSpec:
        # The maximum length is the block of a state that is kept once a request.
        if length is not None and isinstance(layer, MambaState) and layer.block_size == engine.limits.max_model_len:
            layer = replace(layer, block_size=length)
        if dtype is not None:
            layer = _plain_attention(layer, "kv_cache_dtype")
            if isinstance(layer, MlaAttention):
                raise PlanError(
                    f"kv_cache_dtype: the attention backend decides how the vectors of MLA are packed; {OFFLINE}"
                )
            layer = replace(layer, element_bytes=CACHE_BYTES[str(named)])
        return layer if new == old else _with_ranks(layer, old, new)

    stages = engine.layers if new == old else engine.layers[::old]
    workers = ({name: under(layer) for name, layer in layers.items()} for layers in stages)
    return tuple(layers for layers in workers for _ in range(1 if new == old else new))


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
