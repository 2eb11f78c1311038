"""The encoder cache over all ranks, and the bytes of its budget."""

from __future__ import annotations

from collections.abc import Sequence

from highwater.readings.rank import EncoderCache, EncoderCacheTotals, RankReading


def encoder_totals(ranks: Sequence[RankReading]) -> EncoderCacheTotals | None:
    caches = [rank.encoder_cache for rank in ranks if rank.encoder_cache is not None]
    if not caches:
        return None
    return EncoderCacheTotals(
        entries=max(cache.entries for cache in caches),
        device_bytes=sum(cache.device_bytes for cache in caches),
        host_bytes=sum(cache.host_bytes for cache in caches),
        capacity_embeds=max((c.capacity_embeds for c in caches if c.capacity_embeds is not None), default=None),
        oldest_age_seconds=max(
            (c.oldest_age_seconds for c in caches if c.oldest_age_seconds is not None), default=None
        ),
        spills=max(cache.spills for cache in caches),
        restores=max(cache.restores for cache in caches),
        restore_seconds=max(cache.restore_seconds for cache in caches),
    )


def budget_bytes(cache: EncoderCache | None) -> int | None:
    """Return how large the cache can grow, device and host, by the bytes that it holds now for each embedding."""
    if cache is None or not cache.capacity_embeds or not cache.embeds:
        return None
    return cache.capacity_embeds * (cache.device_bytes + cache.host_bytes) // cache.embeds
