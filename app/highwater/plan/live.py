"""The running engine under other flags: its own layers sized again, its own measurements carried over.

What follows from layers and bytes is computed exactly. What only a start can measure (activation, graphs, non-torch
memory) is taken from the start that was measured, and where a flag changes it, the answer is an estimate with bounds.
A flag whose effect the running engine does not show is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from highwater.accounting.engine_budget import EncoderLimits, StartMemory
from highwater.plan.errors import PlanError, short
from highwater.plan.estimates import requested_bytes
from highwater.plan.figure import Grade
from highwater.plan.flags import EngineFlags
from highwater.plan.generations import generation_of
from highwater.plan.images import ImageTokens
from highwater.plan.kv_view import LiveEngine
from highwater.plan.layers import rank_heads
from highwater.plan.pool import KvPool, deciding_workers, plan_pool
from highwater.plan.specs import AttentionLayer, Layers, LayerSpec, MambaState, MlaAttention
from highwater.plan.wish import Granted, Images, Wish, grant

_LIMITS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override")
# The flags whose effect follows from the running engine's layers and measurements, and the keys of a request.
_SIZES = ("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype", "tensor_parallel_size")
CHANGEABLE = (*_LIMITS, *_SIZES)
REQUEST_KEYS = (*CHANGEABLE, "images_per_prompt", "wish")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_OFFLINE = "plan it from the model's config.json: `highwater plan CONFIG_OR_DIR`"
MAX_RANKS = 1024
MAX_NUMBER = 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """The bytes for the KV cache of each worker, and how well they are known."""

    each: tuple[int, ...]  # by worker
    # ``engine``: as the engine has them now; ``exact``: given; ``measured``: follow from the measured start;
    # ``estimated``: within the bounds.
    grade: Grade = "engine"
    # The least and the most that the binding worker has; None where there is nothing to bound.
    low: int | None = None
    high: int | None = None
    notes: tuple[str, ...] = ()  # assumptions, in sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """The KV cache of the running engine under other flags."""

    flags: EngineFlags  # all flags, the changed ones among them
    changed: Mapping[str, Any]  # the flags that differ from the running engine's
    pool: KvPool
    available: Bytes  # the bytes that the pool was planned with
    encoder: EncoderLimits | None  # the encoder's budget under these flags; None for a model of text
    notes: tuple[str, ...] = ()


def plan_live(engine: LiveEngine, requested: Mapping[str, Any], images_per_prompt: int | None = None) -> LivePlan:
    """Size the KV cache of the running engine under other flags.

    Args:
        engine: The running engine.
        requested: The flags to change, by the names of `EngineFlags`; None: as it runs.
        images_per_prompt: The images that a prompt may have; None: as it runs.

    Raises:
        PlanError: A flag cannot be planned from a running engine, or its value makes no sense; or vLLM of this version
            would refuse the layers, whatever the bytes.
    """
    ranks = engine.flags.tensor_parallel_size * engine.flags.pipeline_parallel_size
    if len(engine.layers) != ranks:
        raise PlanError(f"only {len(engine.layers)} of the engine's {ranks} workers have reported their start")
    changed = _changes(engine.flags, requested)
    flags = replace(engine.flags, **changed)
    limits = replace(engine.limits, **{key: changed[key] for key in _LIMITS if key in changed})
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise PlanError(
            f"max_num_batched_tokens: {limits.max_num_batched_tokens} is less than max_num_seqs, "
            f"{limits.max_num_seqs}; vLLM refuses that"
        )
    workers = _workers(engine, changed)
    encoder, images = _encoder(engine, changed, images_per_prompt)
    available = _available(engine, changed, len(workers), images_changed=images is not None)
    deciding = deciding_workers(workers, available.each)
    layers, sizes = [workers[number] for number in deciding], [available.each[number] for number in deciding]
    pool = plan_pool(layers, sizes, limits, generation_of(engine.version))
    return LivePlan(
        flags=flags,
        changed=changed if images is None else {**changed, "limit_mm_per_prompt": {"image": images}},
        pool=pool,
        available=available,
        encoder=encoder,
        notes=_notes(engine, changed, pool),
    )


def grant_live(engine: LiveEngine, wish: Wish, cached_image: int | None = None) -> Granted:
    """Find the smallest change of the running engine's flags under which a wish fits.

    Args:
        engine: The running engine.
        wish: The wish.
        cached_image: The average embeddings of an image in its encoder cache; None: it has none.

    Raises:
        PlanError: The wish cannot be planned.
    """
    encoder = engine.workers[0].budget.encoder
    sizes_pool = engine.flags.kv_cache_memory_bytes is None
    return grant(
        wish,
        lambda flags: plan_live(engine, flags).pool,
        image=_image(encoder, wish.images, cached_image),
        utilization=engine.flags.gpu_memory_utilization if sizes_pool else None,
        kv_cache_dtype=engine.flags.kv_cache_dtype,
        tensor_parallel_size=engine.flags.tensor_parallel_size,
        images_per_prompt=None if encoder is None else (encoder.max_items_per_prompt or {}).get("image"),
    )


def _image(encoder: EncoderLimits | None, images: Images | None, cached_image: int | None) -> ImageTokens | None:
    if images is None:
        return None
    if encoder is None or (encoder.max_tokens_per_item is not None and "image" not in encoder.max_tokens_per_item):
        raise PlanError(f"wish: {images.count} images: this engine takes none, or does not report its budget for them")
    if images.width is not None:
        raise PlanError(
            f"wish: the tokens of an image of {images.width}x{images.height} follow from the model's preprocessor, "
            "which a running engine does not show; give the tokens, as in '4 images of 2040 tokens', or name the "
            "model's folder: `highwater plan CONFIG_OR_DIR --live URL --wish WISH`"
        )
    tokens = images.tokens or cached_image or (encoder.max_tokens_per_item or {}).get("image")
    return None if tokens is None else ImageTokens(embeddings=tokens, prompt_tokens=tokens)


def _changes(flags: EngineFlags, requested: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(EngineFlags)}
    changed: dict[str, Any] = {}
    for key, value in requested.items():
        if key not in known:
            raise PlanError(f"{key}: there is no such key; known: {', '.join(REQUEST_KEYS)}")
        if value is None or value == getattr(flags, key):
            continue
        if key not in CHANGEABLE:
            raise PlanError(
                f"{key}: {short(value)} is not how the engine runs, and what it changes is not seen there; {_OFFLINE}"
            )
        changed[key] = _checked(key, value)
    if "kv_cache_memory_bytes" in changed and "gpu_memory_utilization" in changed:
        raise PlanError(
            f"gpu_memory_utilization: {changed['gpu_memory_utilization']} has no effect beside kv_cache_memory_bytes; "
            "give one of them"
        )
    return changed


def _checked(key: str, value: Any) -> Any:  # noqa: ANN401 - a number or a word, by the key
    if key == "kv_cache_dtype":
        if not isinstance(value, str):
            raise PlanError(f"{key}: {short(value)} must be a word, such as auto or fp8")
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "gpu_memory_utilization":
        if not is_number or not 0 < value <= 1:
            raise PlanError(f"{key}: {short(value)} must be a share over 0 and up to 1")
        return value
    most = MAX_RANKS if key == "tensor_parallel_size" else MAX_NUMBER
    if not is_number or isinstance(value, float) or not 1 <= value <= most:
        raise PlanError(f"{key}: {short(value)} must be a whole number of 1 to {most}")
    return value


# --- layers ---


def _workers(engine: LiveEngine, changed: Mapping[str, Any]) -> tuple[Layers, ...]:
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
            f"kv_cache_dtype: {dtype!r} cannot be planned from the running engine; known: auto, "
            f"{', '.join(_DTYPE_BYTES)}"
        )
    return _DTYPE_BYTES[str(name)]


def _with_elements(layer: LayerSpec, size: int) -> LayerSpec:
    attention = _plain_attention(layer, "kv_cache_dtype")
    if isinstance(attention, MlaAttention):
        raise PlanError(f"kv_cache_dtype: the attention backend decides how the vectors of MLA are packed; {_OFFLINE}")
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
                f"another's, so that their number is not seen there; {_OFFLINE}"
            )
        return attention
    return replace(attention, kv_heads=rank_heads(attention.kv_heads * old, new, "tensor_parallel_size"))


def _plain_attention(layer: LayerSpec, key: str) -> AttentionLayer:
    if not isinstance(layer, AttentionLayer):
        raise PlanError(
            f"{key}: the blocks of a model with states (Mamba, linear attention) are aligned anew when it changes, "
            f"which is not seen in the running engine; {_OFFLINE}"
        )
    if layer.token_head_bytes is not None or layer.page_bytes_padded is not None:
        raise PlanError(
            f"{key}: the pages of this engine are packed or padded by a rule that depends on it; {_OFFLINE}"
        )
    return layer


# --- bytes ---


def _available(engine: LiveEngine, changed: Mapping[str, Any], workers: int, *, images_changed: bool) -> Bytes:
    if "kv_cache_memory_bytes" in changed:
        note = "vLLM takes kv_cache_memory_bytes as it is given: nothing checks that the rest has room beside it."
        return Bytes(each=(changed["kv_cache_memory_bytes"],) * workers, grade="exact", notes=(note,))
    have = engine.available_bytes
    # Of ranks that do not run yet, nothing is known but the fewest bytes of those that do.
    each = have if len(have) == workers else (min(have),) * workers
    if engine.flags.kv_cache_memory_bytes is not None and "gpu_memory_utilization" not in changed:
        return Bytes(each=each)
    carried = _Carried(engine, each)
    if "gpu_memory_utilization" in changed:
        carried.request(changed["gpu_memory_utilization"])
    if "tensor_parallel_size" in changed:
        carried.split_weights(engine.flags.tensor_parallel_size / changed["tensor_parallel_size"])
    ratios = {
        key: changed[key] / max(1, getattr(engine.limits, key))
        for key in ("max_num_batched_tokens", "max_num_seqs")
        if key in changed
    }
    if ratios or images_changed:
        carried.change_activation(ratios.get("max_num_batched_tokens", 1.0), ratios.get("max_num_seqs", 1.0))
    return carried.bytes()


class _Carried:
    """The measured bytes, changed step by step to those of other flags."""

    def __init__(self, engine: LiveEngine, each: tuple[int, ...]) -> None:
        self._starts = [worker.budget.memory for worker in engine.workers]
        self._limits = engine.limits
        self._release = generation_of(engine.version).release[:2]
        self._platform = engine.flags.platform
        self._each = each
        self._less = 0  # by how much the lower bound lies under the estimate
        self._more = 0
        self._is_bounded = True
        self._grade: Grade = "engine"
        self._notes: list[str] = []

    def request(self, share: float) -> None:
        """Request another share of the device; what is used beside the KV cache stays."""
        gains = [self._gain(start, share) for start in self._starts]
        if len(gains) == len(self._each):
            self._each = tuple(size + gain for size, gain in zip(self._each, gains, strict=True))
        else:
            self._each = tuple(size + min(gains) for size in self._each)
        self._grade = "measured"
        self._notes.append("Weights, activation, graphs and non-torch memory are those of the running engine's start.")

    def split_weights(self, ratio: float) -> None:
        """Spread the weights over more ranks or fewer."""
        weights = [_reported(start.weights_bytes, "tensor_parallel_size", "weights_bytes") for start in self._starts]
        # The rank that loses least, or takes on most. Norms and other small layers are on every rank, whole.
        gain = round((min(weights) if ratio < 1 else max(weights)) * (1 - ratio))
        self._each = tuple(size + gain for size in self._each)
        if ratio < 1:
            self._less += gain
        else:
            self._more -= gain
        self._grade = "estimated"
        self._notes.append(
            "The weights of a rank are estimated by the ratio of the ranks; activation, graphs and the buffers of the "
            "communication library are those of the running engine."
        )

    def change_activation(self, tokens: float, sequences: float) -> None:
        """Let the peak of activation grow with the tokens of a step; fewer are not taken to free anything.

        Args:
            tokens: The batched tokens, as a multiple of those that the start was measured with.
            sequences: The sequences, likewise: only the sampler's part of the peak grows with them, which is small.
        """
        self._grade = "estimated"
        peaks = [start.peak_activation_bytes for start in self._starts if start.peak_activation_bytes is not None]
        if not peaks:
            if tokens > 1:
                raise PlanError(
                    "max_num_batched_tokens: more of them take memory (the peak of activation) that this engine's "
                    "start did not report; give kv_cache_memory_bytes beside it"
                )
            self._is_bounded = False
            self._notes.append(
                "These flags change the peak of activation a little, which the start did not report: not counted."
            )
            return
        peak = max(0, *peaks)
        growth = round(peak * (max(1.0, tokens) - 1))
        self._each = tuple(size - growth for size in self._each)
        self._less += round(peak * (max(1.0, tokens, sequences) - 1)) - growth
        self._more += growth + round(peak * (1 - min(1.0, tokens, sequences)))
        self._notes.append(
            f"The peak of activation was measured with {self._limits.max_num_batched_tokens} batched tokens and "
            f"{self._limits.max_num_seqs} sequences. It is taken to grow in proportion to the tokens, and not to "
            "shrink; by the lower bound it grows in proportion to the sequences too. Graphs are as they are now."
        )

    def bytes(self) -> Bytes:
        each = tuple(max(0, size) for size in self._each)
        is_bounded = self._is_bounded and self._grade == "estimated"
        return Bytes(
            each=each,
            grade=self._grade,
            low=max(0, min(self._each) - self._less) if is_bounded else None,
            high=max(0, min(self._each) + self._more) if is_bounded else None,
            notes=tuple(self._notes),
        )

    def _gain(self, start: StartMemory, share: float) -> int:
        total = _reported(start.total_bytes, "gpu_memory_utilization", "total_bytes")
        requested = _reported(start.requested_bytes, "gpu_memory_utilization", "requested_bytes")
        wanted = requested_bytes(total, share, self._release, self._platform)
        if start.init_free_bytes is not None and wanted > start.init_free_bytes:
            most = math.floor(100 * start.init_free_bytes / total) / 100
            raise PlanError(
                f"gpu_memory_utilization: {share} is {wanted} bytes, and {start.init_free_bytes} were free when the "
                f"engine started, so that vLLM would refuse to start; at most {most}"
            )
        return wanted - requested


def _reported(value: int | None, key: str, name: str) -> int:
    if value is None:
        raise PlanError(f"{key}: cannot be planned from this engine, whose start did not report {name}; {_OFFLINE}")
    return value


# --- encoder and notes ---


def _encoder(
    engine: LiveEngine, changed: Mapping[str, Any], images_per_prompt: int | None
) -> tuple[EncoderLimits | None, int | None]:
    """Return the encoder's budget under these flags, and the images of a prompt where their limit changes."""
    encoder = engine.workers[0].budget.encoder
    if images_per_prompt is None:
        images = None
    elif encoder is None or "image" not in (encoder.max_tokens_per_item or {}):
        raise PlanError(
            f"images_per_prompt: {images_per_prompt}: this engine takes no images, or does not report its budget"
        )
    else:
        now = (encoder.max_items_per_prompt or {}).get("image")
        images = None if images_per_prompt == now else images_per_prompt
    tokens = changed.get("max_num_batched_tokens")
    if encoder is None or tokens is None:
        return encoder, images
    # vllm 0.32.0 v1/core/encoder_cache_manager.py, `compute_mm_encoder_budget`: at least the largest item.
    budget = max([tokens, *(size for size in (encoder.max_tokens_per_item or {}).values() if size is not None)])
    return replace(encoder, cache_size=budget, compute_budget=budget), images


def _notes(engine: LiveEngine, changed: Mapping[str, Any], pool: KvPool) -> tuple[str, ...]:
    notes = []
    if changed.get("max_model_len", 0) > engine.limits.max_model_len:
        notes.append("vLLM refuses a max_model_len over what the model's config.json allows; that is not checked here.")
    if "kv_cache_dtype" in changed:
        notes.append("That the attention backend of this engine takes this kv_cache_dtype is not checked here.")
    if engine.flags.num_gpu_blocks_override is not None and "num_gpu_blocks_override" not in changed:
        notes.append(f"num_gpu_blocks_override is set: there are {pool.blocks} blocks, whatever the bytes.")
    if engine.layers_are_grouped:
        notes.append(
            "The layers are those of the engine's groups, whose block and page sizes may be padded, as no recorder "
            "saw the start: under other flags vLLM may group them otherwise and make other blocks."
        )
    return tuple(notes)
