"""What the encoder cache and the KV cache held, and the host memory beside them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from app.attribution import host_share
from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import NOTABLE_BYTES, Latest
from app.units import mib

HOST_FULL_RATIO, HOST_HIGH_RATIO = 0.95, 0.90
KV_FULL_RATIO = 0.95
CACHE_FULL_RATIO, CACHE_OVER_RATIO = 0.90, 1.10


def encoder_cache(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """What the encoder cache held, against its capacity where that can be told in bytes."""
    del evidence
    caches = [(cache, rank) for rank in ranks if (cache := rank.encoder_cache) is not None]
    if not caches:
        return None
    cache, rank = max(caches, key=lambda each: each[0].device_bytes)
    if cache.device_bytes <= rank.notable_bytes:
        return None
    capacity = _capacity_bytes(rank)
    fill = cache.device_bytes / capacity if capacity else None
    budget = f", of a budget of {cache.capacity_embeds:,} embeddings" if cache.capacity_embeds is not None else ""
    text = f"On {rank.name} {cache.entries} cached encoder outputs held {mib(cache.device_bytes)} MiB{budget}. "
    if fill is not None and fill > CACHE_OVER_RATIO:
        text += (
            f"That is {fill:.0%} of what the budget comes to ({mib(capacity)} MiB): outputs of one batch share memory, "
            "which is held until the last of them goes, or some are never let go."
        )
    elif fill is not None and fill >= CACHE_FULL_RATIO:
        text += f"It was full ({fill:.0%} of {mib(capacity)} MiB). {known.COMPONENT_MEANING['encoder_cache_bytes']}"
    else:
        text += known.COMPONENT_MEANING["encoder_cache_bytes"]
    return Finding(
        name="encoder_cache",
        weight="clue" if fill is None or fill >= CACHE_FULL_RATIO else "note",
        title=f"the encoder cache of {rank.name} held {mib(cache.device_bytes)} MiB",
        text=text,
        figures={
            "rank": rank.name,
            "entries": cache.entries,
            "device_bytes": cache.device_bytes,
            "capacity_embeds": cache.capacity_embeds,
            "capacity_bytes": capacity,
            "oldest_age_seconds": cache.oldest_age_seconds,
        },
        advice=known.for_component("encoder_cache_bytes", rank.device_type),
    )


def host_memory(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether host memory stood near the limit at which the kernel ends a process."""
    shares = [
        (used / total, used, total, rank)
        for rank in ranks
        if rank.evidence.reading is not None
        for used, total in (host_share(rank.evidence.reading),)
        if used is not None and total
    ]
    if not shares:
        return None
    ratio, used, total, rank = max(shares, key=lambda share: share[0])
    if ratio < HOST_HIGH_RATIO:
        return None
    is_full = ratio >= HOST_FULL_RATIO
    reading = rank.evidence.reading
    is_limited = reading is not None and reading.host_memory.cgroup_limit_bytes == total
    whose = "the container's limit" if is_limited else "the machine's memory"
    spilled = sum(cache.host_bytes for each in ranks if (cache := each.encoder_cache) is not None)
    trimmed = (known.TRIM_HOST_BUDGET,) if spilled > NOTABLE_BYTES else ()
    return Finding(
        name="host_memory",
        weight="likely" if is_full and evidence.kind == "died" else "clue",
        title=f"host memory stood at {ratio:.0%} of {whose}",
        text=(
            f"Where {rank.name} runs, {mib(used)} MiB of host memory were in use, of {mib(total)} ({whose}). At the "
            "limit the kernel's OOM killer ends a process, which then says nothing in its log; the kernel's log and "
            "the container's last state (OOMKilled) tell."
        ),
        figures={"rank": rank.name, "host_used_bytes": used, "host_total_bytes": total, "spilled_bytes": spilled},
        advice=(known.MEMORY_LIMIT, known.MM_PROCESSOR_CACHE, known.RESET_MM_CACHE, *trimmed),
    )


def kv_cache(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether the KV cache was full, which is no memory problem and often taken for one."""
    del ranks
    usage = evidence.load.kv_cache_usage_ratio
    if usage is None:
        usage = evidence.engine.kv_cache_usage_ratio
    if usage is None or usage < KV_FULL_RATIO:
        return None
    waiting = evidence.load.requests_waiting
    queue = f" {waiting} requests were waiting." if waiting else ""
    return Finding(
        name="kv_cache_full",
        weight="note",
        title=f"the KV cache was {usage:.0%} full",
        text=(
            f"The KV cache was {usage:.0%} full.{queue} That makes requests wait, and ends no engine: the pool is "
            "preallocated, and a full one takes no more of the device."
        ),
        figures={
            "kv_cache_usage_ratio": usage,
            "requests_running": evidence.load.requests_running,
            "requests_waiting": waiting,
        },
        advice=(known.RESET_PREFIX_CACHE,),
    )


def _capacity_bytes(rank: Latest) -> int | None:
    """The encoder cache's capacity in bytes, as the entries' own bytes for each embedding tell it."""
    cache = rank.encoder_cache
    sized = [(entry.bytes, entry.embeds) for entry in rank.evidence.entries if entry.bytes and entry.embeds]
    if cache is None or not cache.capacity_embeds or not sized:
        return None
    size, embeds = (sum(parts) for parts in zip(*sized, strict=True))
    return int(cache.capacity_embeds * size / embeds)
