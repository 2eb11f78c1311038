"""The running engine under other flags: its own layers sized again, its own measurements carried over.

What follows from layers and bytes is computed exactly. What only a start can measure (activation, graphs, non-torch
memory) is taken from the start that was measured, and where a flag changes it, the answer is an estimate with bounds.
A flag whose effect the running engine does not show is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias

from highwater.explain.budget import peak_and_graphs
from highwater.explain.card import OnCard, fullest, judge_card
from highwater.explain.command_line import UNNAMED
from highwater.explain.live_engine import OFFLINE, LiveEngine, layers_under
from highwater.explain.wish import Granted, Images, ImageTokens, Wish, grant, wish_json
from highwater.model.engine_budget import EncoderLimits
from highwater.model.report import SCHEMA
from highwater_worker.plan import estimates
from kvplan.errors import PlanError, short
from kvplan.figure import GRADES, Figure, Grade, add, estimated, measured
from kvplan.flags import KINDS, EngineFlags, checked
from kvplan.generations import ASCEND_TAKES_KV_CACHE_BYTES, generation_of, requested_bytes
from kvplan.pool import KvPool, deciding_workers, plan_pool

Changed: TypeAlias = Mapping[str, Any]
"""The flags that change, by the names of `EngineFlags`."""
_SAME = measured(0, "as measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """The bytes for the KV cache of each worker, and how well they are known."""

    each: tuple[int, ...]  # by worker
    # ``engine``: as the engine has them now; ``exact``: given; ``measured``: follow from the measured start;
    # ``estimated``: within the bounds.
    grade: Grade = "engine"
    # The least and the most that the binding worker has; None where there is nothing to bound.
    low: int | None = None
    high: int | None = None
    notes: tuple[str, ...] = ()  # assumptions, in sentences


def bytes_under(engine: LiveEngine, changed: Changed, images: float = 1.0) -> LiveBytes:
    """Return the bytes of each worker with some flags changed, and so many times the images in a prompt.

    Raises PlanError: the start did not report what a flag needs, or vLLM would refuse to start.
    """
    numbers = _standing_in(engine, changed)
    if "kv_cache_memory_bytes" in changed:
        return LiveBytes(each=(changed["kv_cache_memory_bytes"],) * len(numbers), grade="exact")
    each = tuple(engine.available_bytes[number] for number in numbers)
    if engine.flags.kv_cache_memory_bytes is not None:
        return LiveBytes(each=each)
    sizes = [engine.workers[number].budget.memory.weights_bytes for number in numbers]
    weights = [_more_weights(engine, size, changed) for size in sizes]
    activation = [_more_activation(engine, number, changed, images) for number in numbers]
    taken = [add((one, another or _SAME), "") for one, another in zip(weights, activation, strict=True)]
    gains = [_more_requested(engine, number, changed) for number in numbers]
    grade: Grade = "measured" if "gpu_memory_utilization" in changed else "engine"
    if weights[0] is not _SAME or activation[0] is not _SAME:
        grade = "estimated"
    left = [(size + gain, part) for size, gain, part in zip(each, gains, taken, strict=True)]
    is_bounded = grade == "estimated" and None not in activation
    return LiveBytes(
        each=tuple(max(0, size - part.bytes) for size, part in left),
        grade=grade,
        low=max(0, min(size - part.high for size, part in left)) if is_bounded else None,
        high=max(0, min(size - part.low for size, part in left)) if is_bounded else None,
        notes=_byte_notes(engine, changed, activation[0]),
    )


def card_under(
    engine: LiveEngine, flags: EngineFlags, changed: Changed, caches: Mapping[int, int], images: float
) -> OnCard | None:
    """Judge the cards with a KV cache of given bytes or blocks, by what the start measured beside its own.

    ``caches`` are the KV cache's bytes by the worker's number. ``None``: vLLM sizes the KV cache by its share of the
    card, or the engine runs with as much.
    """
    if flags.kv_cache_memory_bytes is None and flags.num_gpu_blocks_override is None:
        return None
    standing_in = _standing_in(engine, changed)
    numbers = {number: standing_in[number] for number in caches}
    made = {number: engine.workers[one].budget.kv_cache.tensor_bytes for number, one in numbers.items()}
    is_as_much = all(
        cache <= (engine.available_bytes[numbers[number]] if made[number] is None else made[number] or 0)
        for number, cache in caches.items()
    )
    steps = max(_ratio(engine, changed, name) for name in ("max_num_batched_tokens", "max_num_seqs"))
    if is_as_much and steps <= 1 and images == 1 and "tensor_parallel_size" not in changed:
        return None
    cards = []
    for number, cache in caches.items():
        worker, why = engine.workers[numbers[number]], "the engine's start did not measure it"
        start, seen, rest, more = worker.budget.memory, worker.reading.components.weights_bytes, None, None
        total = start.total_bytes or worker.reading.total_bytes
        if total is None:
            return OnCard(fits=None, why="The engine does not report the bytes of its device: nothing was compared.")
        try:
            more = _more_activation(engine, numbers[number], changed, images)
        except PlanError as exc:
            why = str(exc)
        whole = seen if start.weights_bytes is None else start.weights_bytes
        weights = None if whole is None else add((measured(whole, ""), _more_weights(engine, whole, changed)), "")
        is_measured = engine.flags.kv_cache_memory_bytes is None and start.init_free_bytes and more is not None
        if is_measured and start.requested_bytes is not None and whole is not None:
            beside = start.requested_bytes - whole - engine.available_bytes[numbers[number]]
            rest = add((measured(beside, ""), more or _SAME), "")
        used = 0 if start.init_free_bytes is None else max(total - start.init_free_bytes, 0)
        cards.append(judge_card(total, used, cache, weights, rest, why_unknown=None if rest else why))
    return fullest(cards)


def _standing_in(engine: LiveEngine, changed: Changed) -> list[int]:
    """Return for each worker the number of the running one that stands for it.

    Of ranks that do not run yet, nothing is known but those of their stage: the one with the fewest bytes stands for
    them.
    """
    now, have = engine.flags.tensor_parallel_size, engine.available_bytes
    if "tensor_parallel_size" not in changed:
        return list(range(len(have)))
    stages = [range(first, first + now) for first in range(0, len(have), now)]
    return [min(stage, key=have.__getitem__) for stage in stages for _ in range(changed["tensor_parallel_size"])]


def _ratio(engine: LiveEngine, changed: Changed, name: str) -> float:
    return float(changed[name] / max(1, getattr(engine.limits, name))) if name in changed else 1.0


def _more_requested(engine: LiveEngine, number: int, changed: Changed) -> int:
    if "gpu_memory_utilization" not in changed:
        return 0
    start, share = engine.workers[number].budget.memory, changed["gpu_memory_utilization"]
    total = _reported(start.total_bytes, "gpu_memory_utilization", "total_bytes")
    requested = _reported(start.requested_bytes, "gpu_memory_utilization", "requested_bytes")
    wanted = requested_bytes(total, share, generation_of(engine.version).release[:2], engine.flags.platform)
    if start.init_free_bytes is not None and wanted > start.init_free_bytes:
        most = math.floor(100 * start.init_free_bytes / total) / 100
        raise PlanError(
            f"gpu_memory_utilization: {share} is {wanted} bytes, and {start.init_free_bytes} were free when the "
            f"engine started, so that vLLM would refuse to start; at most {most}"
        )
    return wanted - requested


def _more_weights(engine: LiveEngine, size: int | None, changed: Changed) -> Figure:
    """Return how many more bytes of weights a rank has, by the ratio of the ranks; some of them stay whole on each."""
    if "tensor_parallel_size" not in changed:
        return _SAME
    more = _reported(size, "tensor_parallel_size", "weights_bytes")
    more = round(more * (engine.flags.tensor_parallel_size / changed["tensor_parallel_size"] - 1))
    return estimated(min(more, 0), more, max(more, 0), "")


def _more_activation(engine: LiveEngine, number: int, changed: Changed, images: float) -> Figure | None:
    """Return how many more bytes activation and graphs take; None: a little, as fewer tokens or requests do.

    The peak grows with a step's tokens. By the upper bound it grows with the requests and images too, and the graphs
    with the requests, for whose numbers they are captured; by the lower bound fewer of them free as much.
    """
    tokens, sequences = (_ratio(engine, changed, name) for name in ("max_num_batched_tokens", "max_num_seqs"))
    if tokens == sequences == images == 1:
        return _SAME
    peak, graphs = peak_and_graphs(engine.workers[number].budget.memory)
    if peak is None:
        if tokens > 1:
            raise PlanError(
                "max_num_batched_tokens: more of them take memory (the peak of activation) that this engine's "
                "start did not report; give kv_cache_memory_bytes beside it"
            )
        return None
    peak, graphs, likely = max(0, peak), max(0, graphs), max(0, peak) * (max(1.0, tokens) - 1)
    low, high = min(1.0, tokens, sequences, images) - 1, max(1.0, tokens, sequences, images) - 1
    return estimated(
        round(peak * low + graphs * (min(1.0, sequences) - 1)),
        round(likely),
        round(peak * high + graphs * (max(1.0, sequences) - 1)),
        "",
    )


def _byte_notes(engine: LiveEngine, changed: Changed, activation: Figure | None) -> tuple[str, ...]:
    notes = []
    if "gpu_memory_utilization" in changed:
        notes.append("Weights, activation, graphs and non-torch memory are those of the running engine's start.")
    if "tensor_parallel_size" in changed:
        notes.append(
            "The weights of a rank are estimated by the ratio of the ranks; activation, graphs and the buffers of the "
            "communication library are those of the running engine."
        )
    if activation is None:
        notes.append("These flags change the peak of activation a little, which the start did not report: not counted.")
    elif activation is not _SAME:
        notes.append(
            f"The peak of activation was measured with {engine.limits.max_num_batched_tokens} batched tokens and "
            f"{engine.limits.max_num_seqs} sequences. It is taken to grow in proportion to the tokens, and not to "
            "shrink; by the lower bound it grows in proportion to the sequences and images too, and the graphs do to "
            "the sequences."
        )
    return tuple(notes)


def _reported(value: int | None, key: str, name: str) -> int:
    if value is None:
        raise PlanError(f"{key}: cannot be planned from this engine, whose start did not report {name}; {OFFLINE}")
    return value


_LIMITS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override")
# The flags whose effect follows from the running engine's layers and measurements, and the keys of a request.
_SIZES = ("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype", "tensor_parallel_size")
CHANGEABLE = (*_LIMITS, *_SIZES)
REQUEST_KEYS = (*CHANGEABLE, "images_per_prompt", "wish")


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    flags: EngineFlags  # all flags, the changed ones among them
    changed: Mapping[str, Any]  # the flags that differ from the running engine's
    pool: KvPool
    card: OnCard | None  # None: vLLM sizes the KV cache by its share of the card, or it is as the engine has it
    available: LiveBytes  # the bytes that the pool was planned with
    encoder: EncoderLimits | None  # the encoder's budget under these flags; None for a model of text
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """True if vLLM starts; None where what it takes of the card is not known, or not known well enough."""
        return self.card.fits if self.pool.fits and self.card is not None else self.pool.fits

    @property
    def refusal(self) -> str | None:
        """The reason that vLLM does not start: the card's, whatever the length, or its own of the length."""
        if self.card is not None and self.card.fits is False:
            return self.card.why
        return None if self.pool.refusal is None else self.pool.refusal.message


def plan_live(engine: LiveEngine, requested: Mapping[str, Any], images_per_prompt: int | None = None) -> LivePlan:
    """Size the KV cache of the running engine under other flags and images in a prompt; None: as it runs.

    ``requested`` has the flags to change, by the names of `EngineFlags`. Raises PlanError: a flag cannot be planned
    from a running engine, or its value makes no sense; or vLLM of this version would refuse the layers, whatever the
    bytes.
    """
    ranks = engine.flags.tensor_parallel_size * engine.flags.pipeline_parallel_size
    if len(engine.layers) != ranks:
        raise PlanError(f"only {len(engine.layers)} of the engine's {ranks} workers have reported their start")
    changed, generation = _changes(engine, requested), generation_of(engine.version)
    flags = replace(engine.flags, **changed)
    limits = replace(engine.limits, **{key: changed[key] for key in _LIMITS if key in changed})
    if engine.limits.max_encoder_tokens == engine.limits.max_num_batched_tokens:  # it follows them
        limits = replace(limits, max_encoder_tokens=limits.max_num_batched_tokens)
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise PlanError(
            f"max_num_batched_tokens: {limits.max_num_batched_tokens} is less than max_num_seqs, "
            f"{limits.max_num_seqs}; vLLM refuses that"
        )
    workers = layers_under(engine, changed)
    images, ratio = _images(engine, images_per_prompt)
    available = bytes_under(engine, changed, ratio)
    deciding = deciding_workers(workers, available.each)
    layers, sizes = [workers[number] for number in deciding], [available.each[number] for number in deciding]
    pool = plan_pool(layers, sizes, limits, generation)
    card = card_under(engine, flags, changed, dict(zip(deciding, pool.cache_bytes, strict=True)), ratio)
    if card is not None and card.fits is False:
        pool = replace(pool, fits=False, max_model_len_that_fits=0)
    return LivePlan(
        flags=flags,
        changed=changed if images is None else {**changed, "limit_mm_per_prompt": {"image": images}},
        pool=pool,
        card=card,
        available=available,
        encoder=_encoder(engine, changed),
        notes=_notes(engine, changed, pool),
    )


def grant_live(engine: LiveEngine, wish: Wish, cached_image: int | None = None) -> Granted:
    """Find the smallest change of the running engine's flags under which a wish fits.

    An image without a size takes `cached_image` embeddings, the average of those in the encoder cache; None: it is
    empty, and those of the largest image are taken. Raises PlanError: the wish cannot be planned.
    """
    encoder = engine.workers[0].budget.encoder
    sizes_pool = engine.flags.kv_cache_memory_bytes is None
    return grant(
        wish,
        lambda flags: plan_live(engine, flags).pool,
        image=_image_tokens(encoder, wish.images, cached_image),
        utilization=engine.flags.gpu_memory_utilization if sizes_pool else None,
        kv_cache_dtype=engine.flags.kv_cache_dtype,
        tensor_parallel_size=engine.flags.tensor_parallel_size,
        images_per_prompt=None if encoder is None else (encoder.max_items_per_prompt or {}).get("image"),
    )


def _image_tokens(encoder: EncoderLimits | None, images: Images | None, cached_image: int | None) -> ImageTokens | None:
    if images is None:
        return None
    if encoder is None or (encoder.max_tokens_per_item is not None and "image" not in encoder.max_tokens_per_item):
        raise PlanError(f"wish: {images.count} images: this engine takes none, or does not report its budget for them")
    if images.width is not None:
        raise PlanError(
            f"wish: the tokens of an image of {images.width}x{images.height} follow from the model's preprocessor, "
            "which a running engine does not show; give the tokens, as in '4 images of 2040 tokens', which vLLM counts "
            "in `highwater plan --wish WISH -- vllm serve MODEL`"
        )
    tokens = images.tokens or cached_image or (encoder.max_tokens_per_item or {}).get("image")
    return None if tokens is None else ImageTokens(embeddings=tokens, prompt_tokens=tokens)


def _changes(engine: LiveEngine, requested: Mapping[str, Any]) -> dict[str, Any]:
    flags, known = engine.flags, KINDS
    changed: dict[str, Any] = {}
    for key, value in requested.items():
        if key not in known:
            raise PlanError(f"{key[:100]}: there is no such key; known: {', '.join(REQUEST_KEYS)}")
        if value is None or value == getattr(flags, key):
            continue
        if key not in CHANGEABLE:
            raise PlanError(
                f"{key}: {short(value)} is not how the engine runs, and what it changes is not seen there; {OFFLINE}"
            )
        changed[key] = checked(key, value)
    if "gpu_memory_utilization" in changed and (
        "kv_cache_memory_bytes" in changed or flags.kv_cache_memory_bytes is not None
    ):
        raise PlanError(
            f"gpu_memory_utilization: {changed['gpu_memory_utilization']} has no effect beside kv_cache_memory_bytes; "
            + ("give one of them" if "kv_cache_memory_bytes" in changed else "the engine runs with it: give that")
        )
    is_ascend, release = flags.platform == "ascend", generation_of(engine.version).release
    if "kv_cache_memory_bytes" in changed and is_ascend and release not in ASCEND_TAKES_KV_CACHE_BYTES:
        raise PlanError(
            f"kv_cache_memory_bytes: {changed['kv_cache_memory_bytes']} has no effect on vllm-ascend "
            f"{engine.version}, which takes it from 0.19 on; give gpu_memory_utilization or num_gpu_blocks_override"
        )
    return changed


def _images(engine: LiveEngine, images_per_prompt: int | None) -> tuple[int | None, float]:
    """Return the images of a prompt where their limit changes, and how many times as many as now these are."""
    encoder = engine.workers[0].budget.encoder
    if images_per_prompt is None:
        return None, 1.0
    if encoder is None or "image" not in (encoder.max_tokens_per_item or {}):
        raise PlanError(
            f"images_per_prompt: {images_per_prompt}: this engine takes no images, or does not report its budget"
        )
    now = (encoder.max_items_per_prompt or {}).get("image")
    return (None, 1.0) if images_per_prompt == now else (images_per_prompt, images_per_prompt / max(1, now or 1))


def _encoder(engine: LiveEngine, changed: Mapping[str, Any]) -> EncoderLimits | None:
    encoder, tokens = engine.workers[0].budget.encoder, changed.get("max_num_batched_tokens")
    if encoder is None or tokens is None:
        return encoder
    # vllm 0.32.0 v1/core/encoder_cache_manager.py, `compute_mm_encoder_budget`: at least the largest item.
    items = encoder.max_tokens_per_item
    budget = None if items is None else max([tokens, *(size for size in items.values() if size is not None)])
    return replace(encoder, cache_size=budget, compute_budget=budget)


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


# --- A plan of a running engine, in the form of docs/plan-by-vllm.md ---

_OF_BYTES: Final = ("available_bytes", "blocks", "tokens", "max_concurrency", "fits", "max_model_len_that_fits")


def live_json(engine: LiveEngine, plan: LivePlan, granted: Granted | None = None) -> dict[str, Any]:
    """Return a plan of a running engine, or of the flags that a wish was granted with, as `POST /memory/plan` does."""
    pool, available, fits = plan.pool.answer(plan.flags.max_model_len or 0), plan.available, plan.fits
    chosen = None if granted is None else granted.chosen
    needed = plan.pool.needed_bytes if chosen is None else chosen.needed_bytes
    if available.low is not None and available.high is not None:
        fits = fits if (needed <= available.low) == (needed <= available.high) else None
    encoder = plan.encoder or EncoderLimits()
    cached, width, element = encoder.cache_size, encoder.embed_width, encoder.embed_bytes
    line, architecture = str(UNNAMED.changed(plan.changed)), engine.workers[0].budget.architecture
    others = f", with {line.removeprefix(f'{UNNAMED} ')}" if plan.changed else ""
    # The pool as it runs is the engine's own; the same formulas on other numbers are known as well as the bytes.
    sized: Grade = max(available.grade, "exact" if plan.changed else "engine", key=GRADES.index)
    grades: dict[str, Grade] = {**dict.fromkeys(_OF_BYTES, sized), **dict.fromkeys(estimates.OF_LAYERS, "exact")}
    grades |= {"available_bytes": available.grade, "fits": sized if plan.card is None else "estimated"}
    return {
        "schema": SCHEMA,
        "status": estimates.STATUS[fits],
        "road": f"{architecture} on vLLM {engine.version}, as it started{others}",
        "versions": {"vllm": engine.version},
        "architecture": architecture,
        "flags": asdict(plan.flags),
        "changed": dict(plan.changed),
        "kv_cache": {
            **pool,
            "fits": fits,
            "available_bytes_low": available.low,
            "available_bytes_high": available.high,
            "refusal": plan.refusal,
            "on_card": None if plan.card is None else plan.card.why,
            "grades": grades,
        },
        "encoder": plan.encoder
        and {
            "compute_embeddings": plan.encoder.compute_budget,
            "cache_embeddings": cached,
            "cache_bytes": None if cached is None or width is None or element is None else cached * width * element,
            "items": {
                modality: {"max_embeddings": size, "cached": cached // size if cached is not None and size else None}
                for modality, size in (plan.encoder.max_tokens_per_item or {}).items()
            },
        },
        "command_line": line if plan.changed else None,
        "notes": [*available.notes, *plan.notes],
        **({} if granted is None else {"wish": wish_json(granted)}),
    }
