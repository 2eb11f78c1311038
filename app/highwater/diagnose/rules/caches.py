"""The caches that vLLM keeps: encoder outputs and KV blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from highwater.diagnose.advice import COMPONENT_MEANING, for_component
from highwater.diagnose.case import Case, RankCase, highest
from highwater.diagnose.finding import Finding, finding
from highwater.diagnose.rules.device import has_run_out
from highwater.readings.rank import EncoderUnprofiledBy

KV_FULL_RATIO = 0.95
WHY_UNPROFILED: Final[Mapping[EncoderUnprofiledBy, str]] = {
    "skip_mm_profiling": "--skip-mm-profiling is set.",
    "vllm_ascend": "vllm-ascend 0.11.0 and 0.12.0rc1 profile neither the encoder nor its cache.",
    "runner_v2": "Model runner V2 does not profile it before vLLM 0.27.",
}
AGAINST_UNPROFILED: Final[Mapping[EncoderUnprofiledBy, str]] = {
    "skip_mm_profiling": "profile_encoder",
    "vllm_ascend": "upgrade_ascend",
    "runner_v2": "upgrade_runner",
}
CACHE_FULL_RATIO, CACHE_OVER_RATIO = 0.90, 1.10


def encoder_cache(case: Case) -> Finding | None:
    held, rank = highest(case.ranks, _cached_bytes) or (0, None)
    # After a load it matters how far the cache can still grow, however little it holds.
    if rank is None or (cache := rank.now.encoder_cache) is None or held <= (0 if case.is_load else rank.notable_bytes):
        return None
    capacity = _capacity_bytes(rank)
    fill = held / capacity if capacity else None
    is_over, is_full = (fill is not None and fill > CACHE_OVER_RATIO), (fill is not None and fill >= CACHE_FULL_RATIO)
    budget = "" if cache.capacity_embeds is None else f", of a budget of {cache.capacity_embeds:,} embeddings"
    return finding(
        "encoder_cache",
        weight="clue" if not case.is_load and (fill is None or is_full) else "note",
        advice=("max_num_batched_tokens",) if case.is_load else for_component("encoder_cache_bytes", rank.device_type),
        rank=rank,
        cache=cache,
        capacity=capacity,
        budget=budget,
        fill=fill,
        is_over=is_over,
        is_full=is_full and not is_over,
        room=None if capacity is None else capacity - held,
        meaning=COMPONENT_MEANING["encoder_cache_bytes"],
    )


def _cached_bytes(rank: RankCase) -> int | None:
    return None if rank.now.encoder_cache is None else rank.now.encoder_cache.device_bytes


def _capacity_bytes(rank: RankCase) -> int | None:
    cache = rank.now.encoder_cache
    sized = [(entry.bytes, entry.embeds) for entry in rank.entries if entry.bytes and entry.embeds]
    if cache is not None and sized:  # recorders list their entries without embeddings
        held, embeds = (sum(parts) for parts in zip(*sized, strict=True))
        cache = replace(cache, device_bytes=held, host_bytes=0, embeds=embeds)
    return None if cache is None else cache.budget_bytes


def encoder_not_profiled(case: Case) -> Finding | None:
    ranks = [rank for rank in case.ranks if rank.now.launch.encoder_unprofiled_by is not None]
    if not ranks or (by := ranks[0].now.launch.encoder_unprofiled_by) is None:
        return None
    grown = sum(max(case.grown.get(name, 0), 0) for name in ("encoder_cache_bytes", "other_tensors_bytes"))
    has_grown = grown > case.notable_bytes
    capacity, _ = highest(ranks, _capacity_bytes) or (None, None)
    return finding(
        "encoder_not_profiled",
        weight="likely" if has_grown and has_run_out(case) else "clue",
        advice=(AGAINST_UNPROFILED[by], "max_num_batched_tokens", "limit_mm_per_prompt", "gpu_memory_utilization"),
        rank=ranks[0].name,
        by=WHY_UNPROFILED[by],
        cache_bytes=capacity,
        held_bytes=max((_cached_bytes(rank) or 0) for rank in ranks),
        embeddings=None,
        is_given=case.is_pool_given,
        grown=grown if has_grown else None,
    )


def kv_cache_full(case: Case) -> Finding | None:
    is_full = (case.load.kv_cache_usage_ratio or 0.0) >= KV_FULL_RATIO
    return finding("kv_cache_full", load=case.load) if is_full else None
