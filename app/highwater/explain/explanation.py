"""The explanation of an engine's memory: each rank's budget, each engine's KV pool, the encoder, and a paragraph.

Pure; no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from highwater.explain.budget import RankBudget, block_bytes, encoder_bytes, rank_budget
from highwater.explain.live_engine import LiveEngine, LiveWorker, live_engine
from highwater.model.engine_budget import EngineBudget, EngineLimits
from highwater.model.rank import Device, EncoderUnprofiledBy, Launch, RankReading
from highwater.model.units import gib_text, size_text
from kvplan import Limits, PlanError
from kvplan.generations import ASCEND_SKIPS_ENCODER, V2_PROFILES_ENCODER, generation_of
from kvplan.pool import KvPool, deciding_workers, plan_pool

LENGTHS: Final = (1_024, 8_192)
"""Lengths of requests that are shown beside the maximum."""
_OF_GROUP: Final = {name: name for name in ("layers", "block_size", "page_bytes")} | {"window": "sliding_window"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Layers that share block tables, as the engine made them; None: not reported."""

    kind: str  # vLLM's class of the layer
    layers: int | None
    block_size: int | None  # tokens a block
    page_bytes: int | None  # that one layer takes of a block
    window: int | None = None  # of sliding window layers, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNeed:
    """The part of the pool that one request of a length takes while it runs, and at most while it stays cached."""

    tokens: int
    blocks: int  # of all groups together
    bytes: int  # on each rank
    requests: int  # that run at once, in the blocks that are not the null block


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One data-parallel engine's KV cache; None: not known."""

    dp_rank: int | None
    blocks: int | None = None  # the engine's own number, the null block included
    block_size: int | None = None  # tokens a block, as configured
    bytes_per_block: int | None = None  # all layers of the rank included
    groups: tuple[GroupView, ...] = ()
    binding_rank: int | None = None  # the rank with the fewest bytes, which decides
    available_bytes: int | None = None  # those bytes
    tokens: int | None = None  # the log's "KV cache size": the engine's own where its workers see it, else as printed
    tokens_grade: str | None = None  # ``engine`` or ``exact``
    tokens_meaning: str | None = None  # the meaning of that number on this version
    max_concurrency: float | None = None  # requests of the maximum length at once, as printed
    # By the arithmetic of this version, from the engine's layers and bytes.
    planned_blocks: int | None = None
    planned_bytes_per_block: int | None = None
    needed_bytes: int | None = None  # the need of one request of the maximum length
    max_model_len_that_fits: int | None = None
    differences: tuple[str, ...] = ()  # where engine and arithmetic disagree, a sentence each
    problem: str | None = None  # why the arithmetic is not possible
    note: str | None = None  # what is uncertain about it
    conversations: tuple[RequestNeed, ...] = ()
    # For the KV cache if everything were counted that is known to be in use, and the blocks and tokens of that.
    fully_counted_bytes: int | None = None
    fully_counted_blocks: int | None = None
    fully_counted_tokens: int | None = None


def pool_view(workers: Sequence[LiveWorker], ranks: Sequence[RankBudget]) -> PoolView:
    kv = workers[0].budget.kv_cache
    sizes = [(size, rank.rank) for rank in ranks if (size := rank.available_bytes) is not None]
    least, binding = min(sizes, key=lambda one: one[0], default=(None, None))
    view = PoolView(
        dp_rank=ranks[0].dp_rank,
        blocks=kv.blocks,
        block_size=kv.block_size,
        bytes_per_block=block_bytes(workers[0].budget),
        groups=tuple(
            GroupView(
                kind=str(group.get("kind"))[:60],
                **{name: group[own] if type(group.get(own)) is int else None for name, own in _OF_GROUP.items()},
            )
            for group in kv.groups or ()
        ),
        binding_rank=binding,
        available_bytes=least,
        tokens=kv.size_tokens,
        tokens_grade=None if kv.size_tokens is None else "engine",
        max_concurrency=kv.max_concurrency,
    )
    try:
        return _with_arithmetic(view, live_engine(workers), [rank.fully_counted_bytes for rank in ranks])
    except PlanError as exc:
        return replace(view, problem=str(exc))
    except ArithmeticError as exc:  # numbers of a file that no engine has
        return replace(view, problem=f"what its workers report makes no pool: {exc}")


def _with_arithmetic(view: PoolView, engine: LiveEngine, counted: Sequence[int | None]) -> PoolView:
    """``counted`` are each rank's bytes for the KV cache if everything were counted; None: as they are."""
    generation = generation_of(engine.version)
    deciding = deciding_workers(engine.layers, engine.available_bytes)
    plan = partial(plan_pool, [engine.layers[number] for number in deciding], generation=generation)
    available = [engine.available_bytes[number] for number in deciding]
    planned = plan(available, engine.limits)
    least = None if None in counted else min(size or 0 for size in counted)
    fully = None if not least or least < 0 else plan([least] * len(available), engine.limits)
    own, ours = view.max_concurrency, planned.max_concurrency
    pairs = (
        ("blocks", view.blocks, planned.blocks),
        ("bytes a block", view.bytes_per_block, planned.bytes_per_block),
        ("tokens", view.tokens, planned.tokens),
        ("maximum concurrency", None if own is None else round(own, 2), None if ours is None else round(ours, 2)),
    )
    differences = [
        f"{what}: the engine has {one:,}, the arithmetic of {engine.version} gives {other:,}"
        for what, one, other in pairs
        if one is not None and other is not None and one != other
    ]
    if differences and engine.layers_are_grouped:
        differences.append(
            "the layers are as the engine grouped them, because its start was not seen: that may be why "
            "(a recorder that starts with the engine sees it)"
        )
    return replace(
        view,
        tokens=planned.tokens if view.tokens is None else view.tokens,
        tokens_grade=view.tokens_grade or (None if planned.tokens is None else "exact"),
        tokens_meaning=_meaning(generation.tokens_printed, planned, engine),
        max_concurrency=ours if own is None else own,
        planned_blocks=planned.blocks,
        planned_bytes_per_block=planned.bytes_per_block,
        needed_bytes=planned.needed_bytes,
        max_model_len_that_fits=planned.max_model_len_that_fits,
        differences=tuple(differences),
        note=generation.note,
        conversations=_conversations(view, planned, engine.limits, partial(plan, available)),
        fully_counted_bytes=least,
        fully_counted_blocks=None if fully is None else fully.blocks,
        fully_counted_tokens=None if fully is None else fully.tokens,
    )


def _meaning(printed: str, pool: KvPool, engine: LiveEngine) -> str:
    length, groups = f"{engine.limits.max_model_len:,}", len(pool.groups)
    if printed == "length":
        return (
            f"the maximum concurrency times the maximum length: {pool.blocks:,} blocks / {pool.blocks_per_request:,} "
            f"for each request of {length} tokens, times {length}"
            + ("" if groups == 1 else "; shorter requests of a hybrid model hold fewer tokens than that")
        )
    size = min(group.block_size for group in pool.groups)
    if groups == 1:
        return f"blocks times tokens a block: {pool.blocks:,} x {size:,}"
    return (
        f"blocks divided by {groups} groups, times the smallest block ({pool.blocks:,} // {groups} x {size:,}): as if "
        "every group kept every token, so a hybrid model holds more than that"
    )


def _conversations(
    view: PoolView, planned: KvPool, limits: Limits, plan: Callable[[Limits], KvPool]
) -> tuple[RequestNeed, ...]:
    rows = []
    for tokens in (*(length for length in LENGTHS if length < limits.max_model_len), limits.max_model_len):
        try:
            need = plan(replace(limits, max_model_len=tokens)).blocks_per_request
        except PlanError:
            continue  # this version refuses the length, so no request can have it
        if need:
            # vLLM's own concurrency counts the null block, which no request gets.
            requests, size = max((view.blocks or planned.blocks) - 1, 0) // need, need * planned.bytes_per_block
            rows.append(RequestNeed(tokens=tokens, blocks=need, bytes=size, requests=requests))
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One engine explained; None: not reported."""

    vllm_version: str | None = None
    ascend_version: str | None = None
    architecture: str | None = None  # the model's class
    model: str | None = None  # the name that the engine serves it under
    limits: EngineLimits | None = None
    parallel: Mapping[str, int | None] = field(default_factory=dict)  # the sizes of its parallel groups
    ranks: tuple[RankBudget, ...] = ()
    pools: tuple[PoolView, ...] = ()  # of each data-parallel engine
    encoder: EncoderView | None = None  # None for a model of text
    problems: tuple[str, ...] = ()  # ranks whose start is not reported, and why
    paragraph: str = ""  # the explanation as text to paste


def explain(
    readings: Sequence[RankReading],
    budget_of: Callable[[RankReading], EngineBudget | None],
    *,
    model: str | None = None,
    vllm_version: str | None = None,
    why_missing: str = "nothing reports its start",
) -> Explanation:
    """Explain an engine by its ranks' readings, with the phases of their starts.

    ``budget_of`` returns the report of a rank's worker on its start; a rank without one needs the setting that
    ``why_missing`` names. ``vllm_version`` is the server's, where no worker reports one.
    """
    problems, workers = [], []
    for reading in readings:
        if (budget := budget_of(reading)) is None:
            problems.append(f"{reading.name}: {why_missing}")
        else:
            workers.append(LiveWorker(reading, budget))
    if not workers:
        return Explanation(model=model, vllm_version=vllm_version, problems=tuple(problems))
    first, ranks = workers[0].budget, tuple(rank_budget(one.budget, one.reading) for one in workers)
    pools = []
    for dp_rank in dict.fromkeys(rank.dp_rank for rank in ranks):
        members = [number for number, rank in enumerate(ranks) if rank.dp_rank == dp_rank]
        pools.append(pool_view([workers[number] for number in members], [ranks[number] for number in members]))
    caches = ((one.reading.encoder_cache, one) for one in workers)
    fullest = max(caches, key=lambda held: held[0].held_bytes if held[0] else 0)[1]
    explanation = Explanation(
        vllm_version=first.vllm_version or vllm_version,
        ascend_version=first.ascend_version,
        architecture=first.architecture,
        model=model,
        limits=first.limits,
        parallel=dict(first.parallel),
        ranks=ranks,
        pools=tuple(pools),
        encoder=encoder_view(fullest.budget, fullest.reading),
        problems=tuple(problems),
    )
    return replace(explanation, paragraph=paragraph(explanation))


def tightest(ranks: Sequence[RankBudget]) -> RankBudget | None:
    """Return the rank with the fewest bytes for its KV cache; the first where that is not known."""
    known = [rank for rank in ranks if rank.available_bytes is not None]
    return min(known, key=lambda rank: rank.available_bytes or 0) if known else next(iter(ranks), None)


def paragraph(explanation: Explanation) -> str:
    rank, encoder = tightest(explanation.ranks), explanation.encoder
    if rank is None:
        return ""
    pool = next((one for one in explanation.pools if one.dp_rank == rank.dp_rank), None)
    sentences = [*_of_rank(explanation, rank), *_of_pool(explanation.limits, rank, pool)]
    found = rank.suggestion
    if found is not None and found.missing:
        sentences.append(found.missing)
    elif found is not None and found.bytes is not None:
        plan = rank.environment.get("VLLM_ENABLE_STARTUP_PLAN") not in {None, "", "0"}
        kept = ", and VLLM_ENABLE_STARTUP_PLAN keeps it for the next start" if plan else ""
        sentences.append(
            f"vLLM's log suggests --kv-cache-memory={found.bytes} ({gib_text(found.bytes)}), which has graphs off it "
            f"twice, as estimated and as captured{kept}; counted once it is {found.counted_once_bytes} "
            f"({gib_text(found.counted_once_bytes)}): {gib_text(found.lost_bytes)} are lost."
        )
    if encoder is not None and encoder.cache_size is not None:
        text = f"The encoder cache keeps {encoder.cache_size:,} embeddings"
        if encoder.cache_bytes is not None:
            bound = "at least " if encoder.bytes_grade == "estimated" else ""
            text += f" ({bound}{gib_text(encoder.cache_bytes)} on each rank)"
        if encoder.items_in_cache and encoder.item_tokens is not None:
            items = f"{encoder.items_in_cache} of the largest {encoder.modality}"
            text += f", filled by {items} ({encoder.item_tokens:,}{encoder.item_side})"
        sentences.append(text + ("; this start did not profile the encoder." if encoder.is_profiled is False else "."))
    return " ".join(sentences)


def _of_rank(explanation: Explanation, rank: RankBudget) -> Iterator[str]:
    who = f"{explanation.model or explanation.architecture or 'The model'} on vLLM "
    who += f"{explanation.vllm_version or 'of unknown version'}, {rank.name}"
    if rank.requested_bytes is None:
        total = f" of {gib_text(rank.total_bytes)}" if rank.total_bytes is not None else ""
        given = "The KV cache's size was given, not a share of the device" if rank.counting == "given" else ""
        yield f"{who}{total}. {given or 'No budget is reported'}."
    else:
        share = "" if rank.utilization is None else f" = {gib_text(rank.total_bytes)} x {rank.utilization:g}"
        yield f"{who}: {gib_text(rank.requested_bytes)} requested{share}."
    others = [part for part in rank.parts if part.key not in {"kv_cache", "null_block", "rounding"} and part.bytes]
    if rank.available_bytes is None or not others:
        return
    listed, left = ", ".join(f"{part.title} {gib_text(part.bytes)}" for part in others), gib_text(rank.available_bytes)
    if rank.requested_bytes is None:
        yield f"Of {gib_text(rank.total_bytes)} the KV cache has {left}; the rest: {listed}."
    else:
        yield f"Of that {listed}; {left} are left for the KV cache."


def _of_pool(limits: EngineLimits | None, rank: RankBudget, pool: PoolView | None) -> Iterator[str]:
    """Yield what the pool holds, and what the formula counts nowhere beside it."""
    if pool is not None and pool.blocks is not None and pool.bytes_per_block is not None:
        text = f"The KV cache has {pool.blocks:,} blocks of {size_text(pool.bytes_per_block)}"
        if pool.tokens is not None:
            text += f", which this version prints as {pool.tokens:,} tokens"
        whole = pool.conversations[-1] if pool.conversations else None
        if whole is not None and limits is not None and whole.tokens == limits.max_model_len:
            text += (
                f"; one request of {whole.tokens:,} tokens takes {size_text(whole.bytes)}, so {whole.requests:,} fit"
            )
        yield f"{text}."
    if not rank.uncounted:
        return
    if pool is not None and rank.fully_counted_bytes is not None:
        missed = [part for part in rank.uncounted if part.key != "others"]
        listed = " and ".join(f"{part.title} {gib_text(part.bytes)} ({part.why})" for part in missed)
        tokens = "" if pool.fully_counted_tokens is None else f", {pool.fully_counted_tokens:,} tokens"
        yield (
            f"This version's formula counts nowhere: {listed}. With that counted, "
            f"{gib_text(rank.fully_counted_bytes)} would be left for the KV cache{tokens}."
        )
    if rank.outside_bytes is not None and rank.left_bytes is not None:
        left = "nothing is" if rank.left_bytes <= 0 else f"{gib_text(rank.left_bytes)} are"
        yield (
            f"Outside the budget there are {gib_text(rank.outside_bytes)} of the device, where all that must live; "
            f"{left} left of it for workspaces and other processes."
        )


# --- The encoder's side of the budget: its limits of computing and caching, in embeddings and bytes. Pure ---

# Pixels that one embedding stands for, along each side: patch size times the patches that are merged.
_PIXELS: Final[Mapping[str, int]] = {"Qwen2VL": 28, "Qwen2_5_VL": 28, "Qwen3VL": 32, "Qwen3_5": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderView:
    """The multimodal budget of one engine; ranks have the same. None: not known."""

    compute_budget: int | None  # the most embeddings that the encoder makes in one step
    cache_size: int | None  # in embeddings
    cache_bytes: int | None  # the same in bytes, on each rank
    # ``measured``: by the entries that it holds; ``estimated``: by the width of the model's embeddings, a lower bound
    # where a model keeps several layers of them.
    bytes_grade: str | None
    held_bytes: int | None  # now, on the fullest rank
    modality: str | None  # of the largest item
    item_tokens: int | None  # the embeddings of that item
    item_pixels: int | None  # the side of a square image of that size, where the model's rule is known
    items_in_cache: int | None  # the number of such items that fills the cache
    profiled_items: int | None  # the number that the start profiled at once
    is_profiled: bool | None  # the start took the encoder into account
    unprofiled_by: EncoderUnprofiledBy | None = None  # why it did not

    @property
    def item_side(self) -> str:
        """The sides of that image in words; empty where they are not known."""
        return "" if self.item_pixels is None else f", {self.item_pixels} x {self.item_pixels} pixels"


def encoder_view(budget: EngineBudget, reading: RankReading) -> EncoderView | None:
    encoder, held, size = budget.encoder, reading.encoder_cache, encoder_bytes(budget, reading)
    if encoder is None:
        return None
    largest = {name: size for name, size in (encoder.max_tokens_per_item or {}).items() if size}
    modality = max(largest, key=largest.__getitem__, default=None)
    tokens = None if modality is None else largest[modality]
    reason = _unprofiled_by(budget, reading.device)
    is_skipped = reason is not None or budget.kv_cache.given_bytes is not None
    # Model runner V2 reports a budget only where it was seen to profile the encoder with it.
    is_v2 = budget.limits is not None and budget.limits.v2_runner
    seen = encoder.cache_size if is_v2 else budget.memory.peak_activation_bytes
    is_measured = held is not None and held.bytes_of(encoder.cache_size) is not None
    sizes = (size for name, size in _PIXELS.items() if (budget.architecture or "").startswith(name))
    pixels, side = next(sizes, None), math.isqrt(tokens or 0)
    is_square = modality == "image" and side * side == tokens
    return EncoderView(
        compute_budget=encoder.compute_budget,
        cache_size=encoder.cache_size,
        cache_bytes=size,
        bytes_grade=None if size is None else "measured" if is_measured else "estimated",
        held_bytes=None if held is None else held.device_bytes,
        modality=modality,
        item_tokens=tokens,
        item_pixels=side * pixels if pixels is not None and is_square else None,
        items_in_cache=None if tokens is None or encoder.cache_size is None else encoder.cache_size // tokens,
        profiled_items=None if modality is None else (encoder.max_items_per_batch or {}).get(modality),
        is_profiled=False if is_skipped else None if seen is None else True,
        unprofiled_by=reason,
    )


def _unprofiled_by(budget: EngineBudget, device: Device) -> EncoderUnprofiledBy | None:
    """Return why a start of a multimodal model did not count the encoder; ``None``: it did, or that is not known."""
    limits = budget.limits
    try:
        release = generation_of(budget.vllm_version or "").release
    except PlanError:
        release = ()
    if budget.encoder is not None and budget.encoder.skips_profiling:
        return "skip_mm_profiling"
    if limits is not None and limits.v2_runner and release and release not in V2_PROFILES_ENCODER:
        return "runner_v2"
    # One that has a peak on record has profiled it all the same.
    is_old_npu = device.traits.platform == "ascend" and release in ASCEND_SKIPS_ENCODER
    return "vllm_ascend" if is_old_npu and budget.memory.peak_activation_bytes is None else None


def launch_of(budget: EngineBudget | None, reading: RankReading, version: str | None) -> Launch:
    """Return what a rank's worker was started with, by its report where it has one; ``version`` is vLLM's."""
    budget_or_version = budget if budget is not None else EngineBudget(vllm_version=version)
    limits, traits = budget_or_version.limits, reading.device.traits
    is_multimodal = reading.encoder_cache is not None and not traits.is_host_memory
    fragments = traits.fragments_below_allocator
    return Launch(
        expandable_segments=budget.expandable_segments if fragments and budget is not None else None,
        sleep_mode=None if limits is None else limits.sleep_mode,
        kv_cache_given=None if budget is None else budget.kv_cache.given_bytes is not None,
        encoder_unprofiled_by=_unprofiled_by(budget_or_version, reading.device) if is_multimodal else None,
    )
