"""The caches that vLLM keeps: encoder outputs and KV blocks. Pure."""

from __future__ import annotations

from highwater.diagnose.advice import COMPONENT_MEANING, for_component
from highwater.diagnose.case import Case, RankCase, highest
from highwater.diagnose.finding import Finding, finding
from highwater.plan.ascend import skips_encoder

KV_FULL_RATIO = 0.95
CACHE_FULL_RATIO, CACHE_OVER_RATIO = 0.90, 1.10


def encoder_cache(case: Case) -> Finding | None:
    """Report what the encoder cache held, against its capacity where that is known in bytes."""
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
    """Return the encoder cache's capacity in bytes, by the bytes that it holds for each embedding."""
    cache = rank.now.encoder_cache
    if cache is None or not cache.capacity_embeds:
        return None
    sized = [(entry.bytes, entry.embeds) for entry in rank.entries if entry.bytes and entry.embeds]
    if sized:
        held, embeds = (sum(parts) for parts in zip(*sized, strict=True))
    else:  # recorders list their entries without embeddings
        held, embeds = cache.device_bytes + cache.host_bytes, cache.embeds
    return int(cache.capacity_embeds * held / embeds) if embeds else None


def unprofiled_encoder(case: Case) -> Finding | None:
    """Report a version that plans without the multimodal encoder."""
    is_multimodal = any(rank.now.encoder_cache for rank in case.ranks)
    is_on_npu = any(rank.device_type == "npu" for rank in case.ranks)
    is_unprofiled = is_multimodal and is_on_npu and skips_encoder(case.engine.version)
    return finding("unprofiled_encoder", engine=case.engine) if is_unprofiled else None


def kv_cache_full(case: Case) -> Finding | None:
    """Report a full KV cache, which is no memory problem and often taken for one."""
    is_full = (case.load.kv_cache_usage_ratio or 0.0) >= KV_FULL_RATIO
    return finding("kv_cache_full", load=case.load) if is_full else None
