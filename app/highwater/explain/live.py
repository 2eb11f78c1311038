"""The running engine under other flags: its own layers sized again, its own measurements carried over.

What follows from layers and bytes is computed exactly. What only a start can measure (activation, graphs, non-torch
memory) is taken from the start that was measured, and where a flag changes it, the answer is an estimate with bounds.
A flag whose effect the running engine does not show is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from highwater.explain.budget import peak_and_graphs
from highwater.explain.card import OnCard, fullest, judge_card
from highwater.explain.command_line import UNNAMED
from highwater.explain.live_engine import OFFLINE, LiveEngine, layers_under
from highwater.explain.wish import Flags, Granted, ImageTokens, Wish, changes, grant, wish_json
from highwater.model.engine_budget import EncoderLimits
from highwater.model.report import SCHEMA
from highwater_worker.plan import cards
from highwater_worker.plan.cards import Figure
from kvplan import FLAG_KINDS, GRADES, EngineFlags, Grade, PlanError, checked_flag, short
from kvplan.generations import ASCEND_TAKES_KV_CACHE_BYTES, generation_of, requested_bytes
from kvplan.pool import KvPool, deciding_workers, plan_pool

_SAME = cards.measured(0, "as measured")


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


@dataclass(frozen=True, slots=True)
class _Under:
    """The running engine with some flags changed, and so many times the images in a prompt."""

    engine: LiveEngine
    flags: EngineFlags  # all flags, the changed ones among them
    changed: Flags
    images: float

    def available(self) -> LiveBytes:
        """Return the bytes of each worker.

        Raises PlanError: the start did not report what a flag needs, or vLLM would refuse to start.
        """
        engine, numbers = self.engine, self.standing_in()
        if "kv_cache_memory_bytes" in self.changed:
            return LiveBytes(each=(self.changed["kv_cache_memory_bytes"],) * len(numbers), grade="exact")
        if engine.flags.kv_cache_memory_bytes is not None:
            return LiveBytes(each=tuple(engine.available_bytes[number] for number in numbers))
        weights = [self.more_weights(engine.workers[number].budget.memory.weights_bytes) for number in numbers]
        activation = [self.more_activation(number) for number in numbers]
        left = [
            cards.left(
                engine.available_bytes[number] + self.more_requested(number),
                {"weights": one, "activation": another or _SAME},
            )
            for number, one, another in zip(numbers, weights, activation, strict=True)
        ]
        grade: Grade = "measured" if "gpu_memory_utilization" in self.changed else "engine"
        if weights[0] is not _SAME or activation[0] is not _SAME:
            grade = "estimated"
        is_bounded = grade == "estimated" and None not in activation
        return LiveBytes(
            each=tuple(one.bytes for one in left),
            grade=grade,
            low=min(one.low for one in left) if is_bounded else None,
            high=min(one.high for one in left) if is_bounded else None,
            notes=self.byte_notes(activation[0]),
        )

    def card(self, caches: Mapping[int, int]) -> OnCard | None:
        """Judge the cards with a KV cache of given bytes or blocks, by what the start measured beside its own.

        ``caches`` are the KV cache's bytes by the worker's number. ``None``: vLLM sizes the KV cache by its share of
        the card, or the engine runs with as much.
        """
        engine = self.engine
        if self.flags.kv_cache_memory_bytes is None and self.flags.num_gpu_blocks_override is None:
            return None
        standing_in = self.standing_in()
        numbers = {number: standing_in[number] for number in caches}
        made = {number: engine.workers[one].budget.kv_cache.tensor_bytes for number, one in numbers.items()}
        is_as_much = all(
            cache <= (engine.available_bytes[numbers[number]] if made[number] is None else made[number] or 0)
            for number, cache in caches.items()
        )
        steps = max(self.ratio("max_num_batched_tokens"), self.ratio("max_num_seqs"))
        if is_as_much and steps <= 1 and self.images == 1 and "tensor_parallel_size" not in self.changed:
            return None
        return fullest(self.judged(numbers[number], cache) for number, cache in caches.items())

    def judged(self, number: int, cache: int) -> OnCard:
        """Judge the card of a running worker with so many bytes for its KV cache."""
        worker, why = self.engine.workers[number], "the engine's start did not measure it"
        start, seen, rest, more = worker.budget.memory, worker.reading.components.weights_bytes, None, None
        total = start.total_bytes or worker.reading.total_bytes
        if total is None:
            return OnCard(fits=None, why="The engine does not report the bytes of its device: nothing was compared.")
        try:
            more = self.more_activation(number)
        except PlanError as exc:
            why = str(exc)
        whole = seen if start.weights_bytes is None else start.weights_bytes
        weights = None if whole is None else _over(whole, self.more_weights(whole))
        is_measured = self.engine.flags.kv_cache_memory_bytes is None and start.init_free_bytes and more is not None
        if is_measured and start.requested_bytes is not None and whole is not None:
            beside = start.requested_bytes - whole - self.engine.available_bytes[number]
            rest = _over(beside, more or _SAME)
        used = 0 if start.init_free_bytes is None else max(total - start.init_free_bytes, 0)
        return judge_card(total, used, cache, weights, rest, why_unknown=None if rest else why)

    def standing_in(self) -> list[int]:
        """Return for each worker the number of the running one that stands for it.

        Of ranks that do not run yet, nothing is known but those of their stage: the one with the fewest bytes stands
        for them.
        """
        now, have = self.engine.flags.tensor_parallel_size, self.engine.available_bytes
        ranks = self.changed.get("tensor_parallel_size")
        if ranks is None:
            return list(range(len(have)))
        stages = [range(first, first + now) for first in range(0, len(have), now)]
        return [min(stage, key=have.__getitem__) for stage in stages for _ in range(ranks)]

    def ratio(self, name: str) -> float:
        now = max(1, getattr(self.engine.limits, name))
        return float(self.changed[name] / now) if name in self.changed else 1.0

    def more_requested(self, number: int) -> int:
        share = self.changed.get("gpu_memory_utilization")
        if share is None:
            return 0
        engine, start = self.engine, self.engine.workers[number].budget.memory
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

    def more_weights(self, size: int | None) -> Figure:
        """Return how many more bytes of weights a rank has, by the ratio of the ranks; some stay whole on each."""
        if "tensor_parallel_size" not in self.changed:
            return _SAME
        ratio = self.engine.flags.tensor_parallel_size / self.changed["tensor_parallel_size"]
        more = round(_reported(size, "tensor_parallel_size", "weights_bytes") * (ratio - 1))
        return Figure(more, min(more, 0), max(more, 0), "estimated", "by the ratio of the ranks")

    def more_activation(self, number: int) -> Figure | None:
        """Return how many more bytes activation and graphs take; None: a little, as fewer tokens or requests do.

        The peak grows with a step's tokens. By the upper bound it grows with the requests and images too, and the
        graphs with the requests, for whose numbers they are captured; by the lower bound fewer of them free as much.
        """
        tokens, sequences, images = self.ratio("max_num_batched_tokens"), self.ratio("max_num_seqs"), self.images
        if tokens == sequences == images == 1:
            return _SAME
        peak, graphs = peak_and_graphs(self.engine.workers[number].budget.memory)
        if peak is None:
            if tokens > 1:
                raise PlanError(
                    "max_num_batched_tokens: more of them take memory (the peak of activation) that this engine's "
                    "start did not report; give kv_cache_memory_bytes beside it"
                )
            return None
        peak, graphs, likely = max(0, peak), max(0, graphs), max(0, peak) * (max(1.0, tokens) - 1)
        low, high = min(1.0, tokens, sequences, images) - 1, max(1.0, tokens, sequences, images) - 1
        return Figure(
            round(likely),
            round(peak * low + graphs * (min(1.0, sequences) - 1)),
            round(peak * high + graphs * (max(1.0, sequences) - 1)),
            "estimated",
            "by the ratio of tokens, requests and images",
        )

    def byte_notes(self, activation: Figure | None) -> tuple[str, ...]:
        notes, limits = [], self.engine.limits
        if "gpu_memory_utilization" in self.changed:
            notes.append("Weights, activation, graphs and non-torch memory are those of the running engine's start.")
        if "tensor_parallel_size" in self.changed:
            notes.append(
                "The weights of a rank are estimated by the ratio of the ranks; activation, graphs and the buffers of "
                "the communication library are those of the running engine."
            )
        if activation is None:
            notes.append(
                "These flags change the peak of activation a little, which the start did not report: not counted."
            )
        elif activation is not _SAME:
            notes.append(
                f"The peak of activation was measured with {limits.max_num_batched_tokens} batched tokens and "
                f"{limits.max_num_seqs} sequences. It is taken to grow in proportion to the tokens, and not to shrink; "
                "by the lower bound it grows in proportion to the sequences and images too, and the graphs do to the "
                "sequences."
            )
        return tuple(notes)

    def notes(self, pool: KvPool) -> tuple[str, ...]:
        engine, notes = self.engine, []
        if self.changed.get("max_model_len", 0) > engine.limits.max_model_len:
            notes.append(
                "vLLM refuses a max_model_len over what the model's config.json allows; that is not checked here."
            )
        if "kv_cache_dtype" in self.changed:
            notes.append("That the attention backend of this engine takes this kv_cache_dtype is not checked here.")
        if engine.flags.num_gpu_blocks_override is not None and "num_gpu_blocks_override" not in self.changed:
            notes.append(f"num_gpu_blocks_override is set: there are {pool.blocks} blocks, whatever the bytes.")
        if engine.layers_are_grouped:
            notes.append(
                "The layers are those of the engine's groups, whose block and page sizes may be padded, as no recorder "
                "saw the start: under other flags vLLM may group them otherwise and make other blocks."
            )
        return tuple(notes)


def _over(size: int, more: Figure) -> Figure:
    return more._replace(bytes=size + more.bytes, low=size + more.low, high=size + more.high)


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
    changed: Flags  # the flags that differ from the running engine's
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


def plan_live(engine: LiveEngine, requested: Flags, images_per_prompt: int | None = None) -> LivePlan:
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
    encoder, images, ratio = engine.workers[0].budget.encoder, None, 1.0
    if images_per_prompt is not None:
        if encoder is None or "image" not in (encoder.max_tokens_per_item or {}):
            raise PlanError(
                f"images_per_prompt: {images_per_prompt}: this engine takes no images, or does not report its budget"
            )
        now = (encoder.max_items_per_prompt or {}).get("image")
        if images_per_prompt != now:
            images, ratio = images_per_prompt, images_per_prompt / max(1, now or 1)
    workers, under = layers_under(engine, changed), _Under(engine, flags, changed, ratio)
    available = under.available()
    deciding = deciding_workers(workers, available.each)
    layers, sizes = [workers[number] for number in deciding], [available.each[number] for number in deciding]
    pool = plan_pool(layers, sizes, limits, generation)
    card = under.card(dict(zip(deciding, pool.cache_bytes, strict=True)))
    if card is not None and card.fits is False:
        pool = replace(pool, fits=False, max_model_len_that_fits=0)
    tokens = changed.get("max_num_batched_tokens")
    if encoder is not None and tokens is not None:
        # vllm 0.32.0 v1/core/encoder_cache_manager.py, `compute_mm_encoder_budget`: at least the largest item.
        items = encoder.max_tokens_per_item
        budget = None if items is None else max([tokens, *(size for size in items.values() if size is not None)])
        encoder = replace(encoder, cache_size=budget, compute_budget=budget)
    return LivePlan(
        flags=flags,
        changed=changed if images is None else {**changed, "limit_mm_per_prompt": {"image": images}},
        pool=pool,
        card=card,
        available=available,
        encoder=encoder,
        notes=under.notes(pool),
    )


def grant_live(engine: LiveEngine, wish: Wish, cached_image: int | None = None) -> Granted:
    """Find the smallest change of the running engine's flags under which a wish fits.

    An image without a size takes `cached_image` embeddings, the average of those in the encoder cache; None: it is
    empty, and those of the largest image are taken. Raises PlanError: the wish cannot be planned.
    """
    encoder, images, image = engine.workers[0].budget.encoder, wish.images, None
    if images is not None:
        if encoder is None or (encoder.max_tokens_per_item is not None and "image" not in encoder.max_tokens_per_item):
            raise PlanError(
                f"wish: {images.count} images: this engine takes none, or does not report its budget for them"
            )
        if images.width is not None:
            raise PlanError(
                f"wish: the tokens of an image of {images.width}x{images.height} follow from the model's preprocessor, "
                "which a running engine does not show; give the tokens, as in '4 images of 2040 tokens', which vLLM "
                "counts in `highwater plan --wish WISH -- vllm serve MODEL`"
            )
        tokens = images.tokens or cached_image or (encoder.max_tokens_per_item or {}).get("image")
        image = None if tokens is None else ImageTokens(embeddings=tokens, prompt_tokens=tokens)
    share = engine.flags.gpu_memory_utilization if engine.flags.kv_cache_memory_bytes is None else None
    steps = changes(share, engine.flags.kv_cache_dtype, engine.flags.tensor_parallel_size)
    limit = None if encoder is None else (encoder.max_items_per_prompt or {}).get("image")
    return grant(wish, lambda flags: plan_live(engine, flags).pool, steps, image=image, images_per_prompt=limit)


def _changes(engine: LiveEngine, requested: Flags) -> dict[str, Any]:
    flags, known = engine.flags, FLAG_KINDS
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
        changed[key] = checked_flag(key, value)
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
    cached = encoder.cache_size
    line, architecture = str(UNNAMED.changed(plan.changed)), engine.workers[0].budget.architecture
    others = f", with {line.removeprefix(f'{UNNAMED} ')}" if plan.changed else ""
    # The pool as it runs is the engine's own; the same formulas on other numbers are known as well as the bytes.
    sized: Grade = max(available.grade, "exact" if plan.changed else "engine", key=GRADES.index)
    grades: dict[str, Grade] = {**dict.fromkeys(_OF_BYTES, sized), **dict.fromkeys(cards.OF_LAYERS, "exact")}
    grades |= {"available_bytes": available.grade, "fits": sized if plan.card is None else "estimated"}
    return {
        "schema": SCHEMA,
        "status": cards.STATUS[fits],
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
            "compute_embeddings": encoder.compute_budget,
            "cache_embeddings": cached,
            "cache_bytes": encoder.cache_bytes,
            "items": {
                modality: {"max_embeddings": size, "cached": cached // size if cached is not None and size else None}
                for modality, size in (encoder.max_tokens_per_item or {}).items()
            },
        },
        "command_line": line if plan.changed else None,
        "notes": [*available.notes, *plan.notes],
        **({} if granted is None else {"wish": wish_json(granted)}),
    }
