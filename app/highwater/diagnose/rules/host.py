"""Host memory: the container's limit, at which the kernel ends a process. Pure."""

from __future__ import annotations

from highwater.accounting.host_share import host_ratio, host_share
from highwater.diagnose.case import NOTABLE_BYTES, Case, highest
from highwater.diagnose.finding import Finding, finding

HOST_FULL_RATIO, HOST_HIGH_RATIO = 0.95, 0.90


def host_memory(case: Case) -> Finding | None:
    """Report that host memory stood near the limit at which the kernel ends a process."""
    ratio, rank = highest(case.ranks, lambda each: host_ratio(each.now)) or (0.0, None)
    if rank is None or ratio < HOST_HIGH_RATIO:
        return None
    used, whole = host_share(rank.now)
    spilled = sum(cache.host_bytes for each in case.ranks if (cache := each.now.encoder_cache) is not None)
    trimmed = ("trim_host_budget",) if spilled > NOTABLE_BYTES else ()
    is_limited = rank.now.host_memory.cgroup_limit_bytes == whole
    return finding(
        "host_memory",
        weight="likely" if ratio >= HOST_FULL_RATIO and case.kind == "died" else "clue",
        advice=("memory_limit", "mm_processor_cache", "reset_mm_cache", *trimmed),
        rank=rank,
        used=used,
        whole=whole,
        spilled=spilled,
        ratio=ratio,
        limit="the container's limit" if is_limited else "the machine's memory",
    )
