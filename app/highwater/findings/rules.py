"""The rule book: the questions asked of the numbers of an incident and of a measured load alike. Pure.

Each rule returns a finding, or ``None``: also where a figure that it needs is not known. A new rule is a function here,
a line in ``RULES`` and its sentences and figures in findings.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, TypeVar

from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.host_share import host_ratio, host_share
from highwater.findings.advice import COMPONENT_MEANING, against_fragmentation, for_component
from highwater.findings.case import NOTABLE_BYTES, Case, RankCase, part_of
from highwater.findings.finding import Finding, finding, times
from highwater.plan.ascend import skips_encoder
from highwater.readings.growth import SeriesGrowth
from highwater.text.growth import leak_line, series_title
from highwater.text.growth import leaks as leaking
from highwater.text.table import component_title
from highwater.units import MIB

Rule: TypeAlias = Callable[[Case], Finding | None]
_Item = TypeVar("_Item")
_Size = TypeVar("_Size", int, float)

# Of total, and in bytes: an allocator keeps less than both in its ordinary course.
UNUSED_RATIO, UNUSED_BYTES = 0.03, 1024 * MIB
SKEW_RATIO, SKEW_BYTES = 0.02, 512 * MIB
HOST_FULL_RATIO, HOST_HIGH_RATIO = 0.95, 0.90
KV_FULL_RATIO = 0.95
CACHE_FULL_RATIO, CACHE_OVER_RATIO = 0.90, 1.10
# Below a device counts as full: on the measured machine the benchmark left 1.4 %, and 180 MiB were refused at 0.1 %.
FULL_RATIO = 0.02
# Of the growth: a component with so much is the one that grew; one with less than the minor share is not named.
MAIN_SHARE, MINOR_SHARE = 0.6, 0.1
_REACH: Final[Mapping[str, str]] = {
    "encoder_cache_bytes": ", which reset_mm_cache does not touch; trim or reset the encoder cache",
    "other_tensors_bytes": ", live tensors of PyTorch, which no remedy takes away",
    "torch_cached_bytes": ", which reset_mm_cache does not touch; release gives back what of it is releasable",
    "non_torch_bytes": ", which is not PyTorch's; release gives back what of it is the allocator's or a workspace's",
}


def highest(items: Iterable[_Item], read: Callable[[_Item], _Size | None]) -> tuple[_Size, _Item] | None:
    """Return the item with the highest figure, and the figure; ``None`` where no item has one."""
    known = [(size, item) for item in items if (size := read(item)) is not None]
    return max(known, key=lambda each: each[0], default=None)


# --- PyTorch's allocator ---


def ooms(case: Case) -> Finding | None:
    """Report that PyTorch's allocator gave up."""
    rise, rank = highest(case.ranks, lambda each: each.ooms) or (0, None)
    return finding("ooms", rank=rank, rise=rise) if rank is not None and rise else None


def alloc_retries(case: Case) -> Finding | None:
    """Report that PyTorch's allocator ran out and tried again."""
    rise, rank = highest(case.ranks, lambda each: each.alloc_retries) or (0, None)
    if rank is None or not rise:
        return None
    return finding(
        "alloc_retries",
        weight="likely" if case.is_load else "clue",
        advice=("policy_earlier", *against_fragmentation(rank.device_type), "gpu_memory_utilization"),
        rank=rank,
        rise=rise,
        often=times(rise),
    )


def unused_reserve(case: Case) -> Finding | None:
    """Report that PyTorch's allocator held much that no tensor used: cached, or in fragments.

    What captured graphs hold between their runs is no tensor's either, and is needed. Where it is known what a release
    would have given back, it is left out.
    """
    unused, rank = highest(case.ranks, _unused_bytes) or (0, None)
    if rank is None or not _is_much(unused, rank):
        return None
    releasable = rank.now.releasable_bytes
    would_help = releasable is None or _is_much(releasable, rank)
    is_full = is_device_full(rank)
    is_reason = is_full and would_help and case.kind not in {"hung", "load"}
    tried, free = rank.failed_allocation_bytes, rank.now.free_bytes or 0
    is_in_fragments = tried is not None and free < tried <= unused
    return finding(
        "unused_reserve",
        weight="likely" if is_reason or is_in_fragments else "clue",
        advice=(
            *(("release",) if would_help else ()),
            *against_fragmentation(rank.device_type),
            *(() if case.is_load else ("policy_earlier",)),
        ),
        rank=rank,
        unused=unused,
        tried=tried,
        is_full=is_full,
        is_load=case.is_load,
        meaning=COMPONENT_MEANING["torch_cached_bytes"],
    )


def _unused_bytes(rank: RankCase) -> int | None:
    if rank.now.releasable_bytes is None:
        return rank.unused_bytes
    return rank.now.releasable_bytes + (rank.now.torch.inactive_split_bytes or 0)


def _is_much(unused: int, rank: RankCase) -> bool:
    return unused > max(UNUSED_BYTES, int(UNUSED_RATIO * (rank.now.total_bytes or 0)))


# --- caches, host ---


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


def kv_cache_full(case: Case) -> Finding | None:
    """Report a full KV cache, which is no memory problem and often taken for one."""
    is_full = (case.load.kv_cache_usage_ratio or 0.0) >= KV_FULL_RATIO
    return finding("kv_cache_full", load=case.load) if is_full else None


# --- the plan ---


def over_budget(case: Case) -> Finding | None:
    """Report that a rank used more than vLLM had planned with."""
    excess, rank = highest(case.ranks, _excess_bytes) or (0, None)
    if rank is None or excess <= rank.notable_bytes:
        return None
    share = rank.now.budget.gpu_memory_utilization
    of_device = f" ({share:g} of the device)" if share is not None else ""
    return finding("over_budget", rank=rank, excess=excess, share=of_device)


def _excess_bytes(rank: RankCase) -> int | None:
    used, requested = rank.peak.used_bytes, rank.now.budget.requested_bytes
    return used - requested if used and requested else None


def unprofiled_encoder(case: Case) -> Finding | None:
    """Report a version that plans without the multimodal encoder."""
    is_multimodal = any(rank.now.encoder_cache for rank in case.ranks)
    is_on_npu = any(rank.device_type == "npu" for rank in case.ranks)
    is_unprofiled = is_multimodal and is_on_npu and skips_encoder(case.engine.version)
    return finding("unprofiled_encoder", engine=case.engine) if is_unprofiled else None


# --- growth ---


def leaks(case: Case) -> Finding | None:
    """Report the series that leaked between requests."""
    found = leaking(case.series)
    if not found:
        return None
    first = found[0]
    return finding(
        "leaks",
        weight="clue" if case.kind in {"hung", "start_failed"} else "likely",
        advice=("restart_frees", *_against_leak(first)),
        first=first,
        leak=leak_line(first),
        others=f"; so does {', '.join(map(series_title, found[1:]))}" if found[1:] else "",
        verdicts=". ".join(f"{series_title(one)}: {one.text}" for one in found),
    )


def _against_leak(series: SeriesGrowth) -> tuple[str, ...]:
    if series.place == "device":
        return ("policy_earlier",)
    return ("memory_limit",) if series.unit == "bytes" else ()


def growth(case: Case) -> Finding | None:
    """Report that used memory grew: how fast, which component it is, and what keeps that small."""
    grown = case.grown_bytes
    if grown is None or not case.has_grown:
        return None
    parts = sorted(((part, name) for name, part in case.grown.items() if part > 0), reverse=True)
    shares = [
        f"{min(part / grown, 1.0):.0%} {component_title(name)}" for part, name in parts if part >= MINOR_SHARE * grown
    ]
    largest, name = parts[0] if parts else (0, "")
    is_main = largest >= MAIN_SHARE * grown
    components = ""
    if shares:
        components = f": {shares[0]}{_REACH.get(name, '')}" if is_main else f": {' and '.join(shares[:2])}"
    slope, seconds = case.bytes_per_second, case.seconds_to_full
    return finding(
        "growth",
        {"grown_bytes": grown, "bytes_per_second": slope, "seconds_to_full": seconds}
        | {component: part for component, part in case.grown.items() if part},
        advice=(*(for_growth(name, case.device_type) if parts else ()), "policy_earlier"),
        ranks="one rank" if len(case.ranks) == 1 else f"{len(case.ranks)} ranks",
        since=case.since,
        components=components,
        rest=", ".join(shares[1:]) if is_main else "",
        meaning=meaning(name, case.device_type) if parts else "",
        pace=None if slope is None or case.is_load else slope * 60,
        forecast=""
        if seconds is None
        else f"; at that pace the first device is full after {seconds / 60:,.1f} minutes",
    )


def meaning(component: str, device_type: str | None) -> str:
    """Return what a component is, on this kind of device."""
    if component == "non_torch_bytes" and device_type == "cpu":
        return "On CPU that is the process's heap, its libraries and its stacks; release gives back what is free in it."
    return COMPONENT_MEANING[component]


def for_growth(component: str, device_type: str | None) -> tuple[str, ...]:
    """Return the advice that keeps a component small that grew."""
    release = ("release",) if component == "non_torch_bytes" else ()
    return (*release, *for_component(component, device_type))


# --- ranks beside each other ---


def skew(case: Case) -> Finding | None:
    """Report that one rank used much more than another on the same device."""
    used = sorted(
        ((rank.peak.used_bytes, rank) for rank in case.ranks if rank.peak.used_bytes is not None),
        key=lambda each: each[0],
    )
    if len(used) < 2:  # noqa: PLR2004 - one rank is not skewed against anything
        return None
    (low, lightest), (high, heaviest) = used[0], used[-1]
    more, total_bytes = high - low, heaviest.now.total_bytes
    if more <= max(SKEW_BYTES, int(SKEW_RATIO * (total_bytes or 0))) or total_bytes != lightest.now.total_bytes:
        return None
    parts = {
        name: mine - other
        for name in COMPONENT_NAMES
        if (mine := part_of(heaviest.peak, name)) is not None and (other := part_of(lightest.peak, name)) is not None
    }
    most, component = highest(parts, parts.get) or (0, "")
    return finding(
        "skew",
        {f"{rank.name} used_bytes": size for size, rank in used} | {"difference_bytes": more},
        peak="at its peak " if case.is_load else "",
        heaviest=heaviest.name,
        high=high,
        lightest=lightest.name,
        low=low,
        component=component_title(component) if most > 0 else None,
    )


def is_device_full(rank: RankCase) -> bool:
    """Return whether next to nothing was free, as far as that is known."""
    return rank.free_ratio is not None and rank.free_ratio < FULL_RATIO


# In the order in which findings of the same weight are shown.
RULES: Final[tuple[Rule, ...]] = (
    ooms,
    unused_reserve,
    host_memory,
    leaks,
    growth,
    over_budget,
    alloc_retries,
    encoder_cache,
    skew,
    unprofiled_encoder,
    kv_cache_full,
)
