"""The explanation of an engine's memory: each rank's budget, each engine's KV pool, the encoder, and a paragraph.

Pure; no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from highwater.accounting.engine_budget import EngineBudget, EngineLimits
from highwater.plan.budget import RankBudget, encoder_bytes, rank_budget
from highwater.plan.live_engine import LiveWorker
from highwater.plan.pool_view import PoolView, pool_sentence, pool_view
from highwater.readings.rank import EncoderUnprofiledBy, Launch, RankReading
from highwater.units import gib_text
from kvplan.errors import PlanError
from kvplan.generations import ASCEND_SKIPS_ENCODER, V2_PROFILES_ENCODER, generation_of


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
    reported = [(reading, budget) for reading in readings if (budget := budget_of(reading)) is not None]
    problems = tuple(
        f"{reading.name}: {why_missing}" for reading in readings if all(reading is not known for known, _ in reported)
    )
    if not reported:
        return Explanation(model=model, vllm_version=vllm_version, problems=problems)
    first = reported[0][1]
    ranks = tuple(rank_budget(budget, reading, reading.start) for reading, budget in reported)
    pools = []
    for dp_rank in dict.fromkeys(reading.dp_rank for reading, _ in reported):
        members = [number for number, (reading, _) in enumerate(reported) if reading.dp_rank == dp_rank]
        workers = [LiveWorker(*reported[number]) for number in members]
        pools.append(pool_view(workers, [ranks[number] for number in members]))
    fullest = max(reported, key=lambda rank: 0 if rank[0].encoder_cache is None else rank[0].encoder_cache.device_bytes)
    explanation = Explanation(
        vllm_version=first.vllm_version or vllm_version,
        ascend_version=first.ascend_version,
        architecture=first.architecture,
        model=model,
        limits=first.limits,
        parallel=dict(first.parallel),
        ranks=ranks,
        pools=tuple(pools),
        encoder=encoder_view(fullest[1], fullest[0]),
        problems=problems,
    )
    return replace(explanation, paragraph=paragraph(explanation))


def tightest(ranks: Sequence[RankBudget]) -> RankBudget | None:
    """Return the rank with the fewest bytes for its KV cache; the first where that is not known."""
    known = [rank for rank in ranks if rank.available_bytes is not None]
    return min(known, key=lambda rank: rank.available_bytes or 0) if known else next(iter(ranks), None)


def paragraph(explanation: Explanation) -> str:
    rank = tightest(explanation.ranks)
    if rank is None:
        return ""
    pool = next((one for one in explanation.pools if one.dp_rank == rank.dp_rank), None)
    sentences = [_budget_sentence(explanation, rank), _parts_sentence(rank)]
    if pool is not None:
        sentences += [pool_sentence(pool, explanation.limits), _fully_counted_sentence(rank, pool)]
    sentences += [_outside_sentence(rank), _suggestion_sentence(rank), _encoder_sentence(explanation.encoder)]
    return " ".join(sentence for sentence in sentences if sentence)


def _budget_sentence(explanation: Explanation, rank: RankBudget) -> str:
    who = f"{explanation.model or explanation.architecture or 'The model'} on vLLM "
    who += f"{explanation.vllm_version or 'of unknown version'}, {rank.name}"
    if rank.requested_bytes is None:
        total = f" of {gib_text(rank.total_bytes)}" if rank.total_bytes is not None else ""
        given = "The KV cache's size was given, not a share of the device" if rank.counting == "given" else ""
        return f"{who}{total}. {given or 'No budget is reported'}."
    share = "" if rank.utilization is None else f" = {gib_text(rank.total_bytes)} x {rank.utilization:g}"
    return f"{who}: {gib_text(rank.requested_bytes)} requested{share}."


def _parts_sentence(rank: RankBudget) -> str:
    others = [part for part in rank.parts if part.key not in {"kv_cache", "null_block", "rounding"} and part.bytes]
    if rank.available_bytes is None or not others:
        return ""
    listed, left = ", ".join(f"{part.title} {gib_text(part.bytes)}" for part in others), gib_text(rank.available_bytes)
    if rank.requested_bytes is None:
        return f"Of {gib_text(rank.total_bytes)} the KV cache has {left}; the rest: {listed}."
    return f"Of that {listed}; {left} are left for the KV cache."


def _fully_counted_sentence(rank: RankBudget, pool: PoolView) -> str:
    if not rank.uncounted or rank.fully_counted_bytes is None:
        return ""
    missed = [part for part in rank.uncounted if part.key != "others"]
    listed = " and ".join(f"{part.title} {gib_text(part.bytes)} ({part.why})" for part in missed)
    tokens = "" if pool.fully_counted_tokens is None else f", {pool.fully_counted_tokens:,} tokens"
    return (
        f"This version's formula counts nowhere: {listed}. With that counted, "
        f"{gib_text(rank.fully_counted_bytes)} would be left for the KV cache{tokens}."
    )


def _outside_sentence(rank: RankBudget) -> str:
    if rank.outside_bytes is None or rank.left_bytes is None or not rank.uncounted:
        return ""
    left = "nothing is" if rank.left_bytes <= 0 else f"{gib_text(rank.left_bytes)} are"
    return (
        f"Outside the budget there are {gib_text(rank.outside_bytes)} of the device, where all that must live; {left} "
        "left of it for workspaces and other processes."
    )


def _suggestion_sentence(rank: RankBudget) -> str:
    found = rank.suggestion
    if found is None or found.bytes is None:
        return "" if found is None else found.missing or ""
    plan = rank.environment.get("VLLM_ENABLE_STARTUP_PLAN") not in {None, "", "0"}
    kept = ", and VLLM_ENABLE_STARTUP_PLAN keeps it for the next start" if plan else ""
    return (
        f"vLLM's log suggests --kv-cache-memory={found.bytes} ({gib_text(found.bytes)}), which has graphs off it "
        f"twice, as estimated and as captured{kept}; counted once it is {found.counted_once_bytes} "
        f"({gib_text(found.counted_once_bytes)}): {gib_text(found.lost_bytes)} are lost."
    )


def _encoder_sentence(encoder: EncoderView | None) -> str:
    if encoder is None or encoder.cache_size is None:
        return ""
    text = f"The encoder cache keeps {encoder.cache_size:,} embeddings"
    if encoder.cache_bytes is not None:
        bound = "at least " if encoder.bytes_grade == "estimated" else ""
        text += f" ({bound}{gib_text(encoder.cache_bytes)} on each rank)"
    if encoder.items_in_cache and encoder.item_tokens is not None:
        items = f"{encoder.items_in_cache} of the largest {encoder.modality}"
        text += f", filled by {items} ({encoder.item_tokens:,}{encoder.item_side})"
    return text + ("; this start did not profile the encoder." if encoder.is_profiled is False else ".")


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
    reason = unprofiled_by(budget, reading.device.type)
    is_skipped = reason is not None or budget.kv_cache.given_bytes is not None
    # Model runner V2 reports a budget only where it was seen to profile the encoder with it.
    is_v2 = budget.limits is not None and budget.limits.v2_runner
    seen = encoder.cache_size if is_v2 else budget.memory.peak_activation_bytes
    is_measured = held is not None and held.embeds
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


def unprofiled_by(budget: EngineBudget, device_type: str | None) -> EncoderUnprofiledBy | None:
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
    is_old_npu = device_type == "npu" and release in ASCEND_SKIPS_ENCODER
    return "vllm_ascend" if is_old_npu and budget.memory.peak_activation_bytes is None else None


def launch_of(budget: EngineBudget | None, reading: RankReading, version: str | None) -> Launch:
    """Return what a rank's worker was started with, by its report where it has one; ``version`` is vLLM's."""
    budget_or_version = budget if budget is not None else EngineBudget(vllm_version=version)
    limits, is_npu = budget_or_version.limits, reading.device.type == "npu"
    is_multimodal = reading.encoder_cache is not None and reading.device.type != "cpu"
    return Launch(
        expandable_segments=budget.expandable_segments if is_npu and budget is not None else None,
        sleep_mode=None if limits is None else limits.sleep_mode,
        kv_cache_given=None if budget is None else budget.kv_cache.given_bytes is not None,
        encoder_unprofiled_by=unprofiled_by(budget_or_version, reading.device.type) if is_multimodal else None,
    )
