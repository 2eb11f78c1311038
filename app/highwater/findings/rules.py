"""The rule book: what is asked of the numbers of an incident and of a measured load alike. Pure.

Each rule gives a finding, or nothing. What is not known answers no rule: a finding is never based on a ``None``. A new
rule is a function here and a line in ``RULES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from highwater.accounting.attribution import COMPONENTS, host_share
from highwater.engine.capabilities import parse_version
from highwater.findings import advice as known
from highwater.findings.case import NOTABLE_BYTES, Case, RankCase, Rule, part_of, times
from highwater.findings.finding import Advice, Finding
from highwater.findings.leaks import leaks
from highwater.text.table import component_title
from highwater.units import MIB, mib, mib_text

# Of total, and in bytes: an allocator keeps less than both in its ordinary course.
UNUSED_RATIO, UNUSED_BYTES = 0.03, 1024 * MIB
SKEW_RATIO, SKEW_BYTES = 0.02, 512 * MIB
HOST_FULL_RATIO, HOST_HIGH_RATIO = 0.95, 0.90
KV_FULL_RATIO = 0.95
CACHE_FULL_RATIO, CACHE_OVER_RATIO = 0.90, 1.10
# Below a device counts as full: on the measured machine the benchmark left 1.4 %, and 180 MiB were refused at 0.1 %.
FULL_RATIO = 0.02
# Of the growth: one component that has so much is what grew; one that has less is not worth a word.
MAIN_SHARE, MINOR_SHARE = 0.6, 0.1
# vllm-ascend of these sizes the KV pool as if the multimodal encoder needed nothing.
_UNPROFILED: Final = ("0.11.0", "0.12.0")
_REACH: Final[Mapping[str, str]] = {
    "encoder_cache_bytes": ", which reset_mm_cache does not touch; trim or reset the encoder cache",
    "other_tensors_bytes": ", live tensors of PyTorch, which no remedy takes away",
    "torch_cached_bytes": ", which reset_mm_cache does not touch; release gives back what of it is releasable",
    "non_torch_bytes": ", which is not PyTorch's; release gives back what of it is the allocator's or a workspace's",
}


# --- PyTorch's allocator ---


def ooms(case: Case) -> Finding | None:
    """Report that PyTorch's allocator gave up."""
    rank = max(case.ranks, key=lambda each: each.ooms or 0, default=None)
    if rank is None or not rank.ooms:
        return None
    return Finding(
        name="ooms",
        weight="likely",
        title=f"PyTorch's allocator on {rank.name} gave up {times(rank.ooms)}",
        text=(
            f"PyTorch counted {rank.ooms} out-of-memory errors on {rank.name}. One in a step ends the engine. Those of "
            "the NPU's workspaces are not in this count."
        ),
        figures={"rank": rank.name, "ooms": rank.now.torch.ooms, "rise": rank.ooms},
        advice=(known.GPU_MEMORY_UTILIZATION, known.LIMIT_MM_PER_PROMPT, known.MAX_NUM_BATCHED_TOKENS),
    )


def alloc_retries(case: Case) -> Finding | None:
    """Report that PyTorch's allocator ran out and tried again."""
    rank = max(case.ranks, key=lambda each: each.alloc_retries or 0, default=None)
    if rank is None or not rank.alloc_retries:
        return None
    often = times(rank.alloc_retries)
    return Finding(
        name="alloc_retries",
        weight="likely" if case.is_load else "clue",
        title=f"the allocator of {rank.name} ran out and tried again {often}",
        text=(
            f"{often.capitalize()} PyTorch's allocator on {rank.name} got no memory, gave back what it held in vain, "
            "and tried again. Each time costs a step its pace; it is the early warning before the error that ends the "
            "engine."
        ),
        figures={"rank": rank.name, "alloc_retries": rank.now.torch.alloc_retries, "rise": rank.alloc_retries},
        advice=(known.POLICY_EARLIER, *known.against_fragmentation(rank.device_type), known.GPU_MEMORY_UTILIZATION),
    )


def unused_reserve(case: Case) -> Finding | None:
    """Report that PyTorch's allocator held much in vain: cached or in fragments.

    What captured graphs hold between their runs is no tensor's either, and not in vain. Where it is known what a
    release would have given back, it is left out.
    """
    sizes = [(in_vain, rank) for rank in case.ranks if (in_vain := _in_vain(rank)) is not None]
    if not sizes:
        return None
    unused, rank = max(sizes, key=lambda each: each[0])
    if not _is_much(unused, rank):
        return None
    torch, releasable = rank.now.torch, rank.now.releasable_bytes
    would_help = releasable is None or _is_much(releasable, rank)
    is_full = is_device_full(rank)
    title = f"PyTorch's allocator held {mib_text(unused)} on {rank.name} that no tensor used"
    text = f"{mib_text(torch.reserved_bytes)} were reserved, {mib_text(torch.allocated_bytes)} allocated."
    if torch.inactive_split_bytes:
        text += (
            f" {mib_text(torch.inactive_split_bytes)} of it lie in pieces beside live tensors: those cannot be given "
            "back."
        )
    if releasable is not None:
        text += f" A release would have given {mib_text(releasable)} back to the device."
    if is_full:
        text += " The device had next to none left for others meanwhile."
    if case.is_load:
        text += f" {known.COMPONENT_MEANING['torch_cached_bytes']}"
    explains = is_full and would_help and case.kind not in {"hung", "load"}
    return Finding(
        name="unused_reserve",
        weight="likely" if explains else "clue",
        title=title,
        text=text,
        figures={
            "rank": rank.name,
            "reserved_bytes": torch.reserved_bytes,
            "allocated_bytes": torch.allocated_bytes,
            "inactive_split_bytes": torch.inactive_split_bytes,
            "releasable_bytes": releasable,
        },
        advice=(
            *((known.RELEASE,) if would_help else ()),
            *known.against_fragmentation(rank.device_type),
            *(() if case.is_load else (known.POLICY_EARLIER,)),
        ),
    )


def _in_vain(rank: RankCase) -> int | None:
    if rank.now.releasable_bytes is None:
        return rank.unused_bytes
    return rank.now.releasable_bytes + (rank.now.torch.inactive_split_bytes or 0)


def _is_much(unused: int, rank: RankCase) -> bool:
    return unused > max(UNUSED_BYTES, int(UNUSED_RATIO * (rank.now.total_bytes or 0)))


# --- caches, host ---


def encoder_cache(case: Case) -> Finding | None:
    """Report what the encoder cache held, against its capacity where that is known in bytes."""
    caches = [(cache, rank) for rank in case.ranks if (cache := rank.now.encoder_cache) is not None]
    if not caches:
        return None
    cache, rank = max(caches, key=lambda each: each[0].device_bytes)
    # After a load how far the cache can still grow is worth a word, however little it holds.
    if cache.device_bytes <= (0 if case.is_load else rank.notable_bytes):
        return None
    capacity = _capacity_bytes(rank)
    fill = cache.device_bytes / capacity if capacity else None
    budget = f", of a budget of {cache.capacity_embeds:,} embeddings" if cache.capacity_embeds is not None else ""
    text = f"On {rank.name} {cache.entries} cached encoder outputs held {mib_text(cache.device_bytes)}{budget}. "
    if capacity is None or fill is None:
        text += known.COMPONENT_MEANING["encoder_cache_bytes"]
    elif fill > CACHE_OVER_RATIO:
        text += (
            f"That is {fill:.0%} of what the budget comes to ({mib_text(capacity)}): outputs of one batch share "
            "memory, which is held until the last of them goes, or some are never let go."
        )
    elif fill >= CACHE_FULL_RATIO:
        text += (
            f"It was full ({fill:.0%} of {mib_text(capacity)}): more load makes it no larger. "
            f"{known.COMPONENT_MEANING['encoder_cache_bytes']}"
        )
    else:
        text += (
            f"It was {fill:.0%} full and can grow by {mib_text(capacity - cache.device_bytes)} more on every rank. "
            f"{known.COMPONENT_MEANING['encoder_cache_bytes']}"
        )
    is_clue = not case.is_load and (fill is None or fill >= CACHE_FULL_RATIO)
    return Finding(
        name="encoder_cache",
        weight="clue" if is_clue else "note",
        title=f"the encoder cache of {rank.name} held {mib_text(cache.device_bytes)}",
        text=text,
        figures={
            "rank": rank.name,
            "entries": cache.entries,
            "device_bytes": cache.device_bytes,
            "capacity_embeds": cache.capacity_embeds,
            "capacity_bytes": capacity,
            "oldest_age_seconds": cache.oldest_age_seconds,
        },
        advice=(known.MAX_NUM_BATCHED_TOKENS,)
        if case.is_load
        else known.for_component("encoder_cache_bytes", rank.device_type),
    )


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
    shares = [
        (used / whole, used, whole, rank)
        for rank in case.ranks
        for used, whole in (host_share(rank.now),)
        if used is not None and whole
    ]
    if not shares:
        return None
    ratio, used, whole, rank = max(shares, key=lambda share: share[0])
    if ratio < HOST_HIGH_RATIO:
        return None
    is_limited = rank.now.host_memory.cgroup_limit_bytes == whole
    whose = "the container's limit" if is_limited else "the machine's memory"
    spilled = sum(cache.host_bytes for each in case.ranks if (cache := each.now.encoder_cache) is not None)
    trimmed = (known.TRIM_HOST_BUDGET,) if spilled > NOTABLE_BYTES else ()
    return Finding(
        name="host_memory",
        weight="likely" if ratio >= HOST_FULL_RATIO and case.kind == "died" else "clue",
        title=f"host memory stood at {ratio:.0%} of {whose}",
        text=(
            f"Where {rank.name} runs, {mib_text(used)} of host memory were in use, of {mib(whole)} ({whose}). At the "
            "limit the kernel's OOM killer ends a process, which then says nothing in its log; the kernel's log and "
            "the container's last state (OOMKilled) say so."
        ),
        figures={"rank": rank.name, "host_used_bytes": used, "host_total_bytes": whole, "spilled_bytes": spilled},
        advice=(known.MEMORY_LIMIT, known.MM_PROCESSOR_CACHE, known.RESET_MM_CACHE, *trimmed),
    )


def kv_cache(case: Case) -> Finding | None:
    """Report a full KV cache, which is no memory problem and often taken for one."""
    usage, waiting = case.load.kv_cache_usage_ratio, case.load.requests_waiting
    if usage is None or usage < KV_FULL_RATIO:
        return None
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
            "requests_running": case.load.requests_running,
            "requests_waiting": waiting,
        },
        advice=(known.RESET_PREFIX_CACHE,),
    )


# --- the plan ---


def over_budget(case: Case) -> Finding | None:
    """Report that a rank used more than vLLM had planned with."""
    over = [
        (rank.peak.used_bytes - rank.now.budget.requested_bytes, rank)
        for rank in case.ranks
        if rank.now.budget.requested_bytes and rank.peak.used_bytes
    ]
    excess, rank = max(over, key=lambda each: each[0], default=(0, None))
    if rank is None or excess <= rank.notable_bytes:
        return None
    budget = rank.now.budget
    share = budget.gpu_memory_utilization
    of_share = f" ({share:g} of the device)" if share is not None else ""
    return Finding(
        name="over_budget",
        weight="clue",
        title=f"{rank.name} used {mib_text(excess)} more than vLLM had budgeted",
        text=(
            f"At start vLLM planned {rank.name} with {mib_text(budget.requested_bytes)}{of_share}; "
            f"{mib(rank.peak.used_bytes)} were in use. The rest of the device is for what profiling does not see, and "
            "for other processes: it was being used up."
        ),
        figures={
            "rank": rank.name,
            "used_bytes": rank.peak.used_bytes,
            "requested_bytes": budget.requested_bytes,
            "gpu_memory_utilization": share,
        },
        advice=(known.GPU_MEMORY_UTILIZATION, known.OTHER_PROCESSES),
    )


def unprofiled_encoder(case: Case) -> Finding | None:
    """Report a version that plans without the multimodal encoder."""
    version = case.engine.version
    is_multimodal = any(rank.now.encoder_cache for rank in case.ranks)
    is_one_of_them = str(parse_version(version)) in _UNPROFILED
    if not (is_one_of_them and is_multimodal and any(rank.device_type == "npu" for rank in case.ranks)):
        return None
    return Finding(
        name="unprofiled_encoder",
        weight="clue",
        title="this version sizes the KV cache as if the multimodal encoder needed no memory",
        text=(
            f"vLLM {version} on the NPU: vllm-ascend 0.11.0 and 0.12.0rc1 profile neither the encoder nor its cache. "
            "Both, the graphs and the workspaces have to fit into what gpu_memory_utilization leaves over."
        ),
        figures={"version": version},
        advice=(known.GPU_MEMORY_UTILIZATION, known.UPGRADE_ASCEND),
    )


# --- growth ---


def growth(case: Case) -> Finding | None:
    """Report that used memory grew: how fast, which component it is, and what keeps that small."""
    grown = case.grown_bytes
    if grown is None or grown <= case.notable_bytes:
        return None
    parts = sorted(((part, name) for name, part in case.grown.items() if part > 0), reverse=True)
    shares = [f"{min(part / grown, 1.0):.0%} {component_title(name)}" for part, name in parts if _counts(part, grown)]
    title = f"used memory grew by {mib_text(grown)} over {_ranks(case)} {case.since}"
    text, advice = "Which component it is in is not known.", list[Advice]()
    if parts:
        largest, name = parts[0]
        is_main = largest >= MAIN_SHARE * grown
        if shares:
            title += f": {shares[0]}{_REACH.get(name, '')}" if is_main else f": {' and '.join(shares[:2])}"
        rest = f"The rest: {', '.join(shares[1:])}. " if is_main and shares[1:] else ""
        text = f"{rest}{meaning(name, case.device_type)}"
        advice = list(for_growth(name, case.device_type))
    return Finding(
        name="growth",
        weight="clue",
        title=title,
        text=f"{text}{_forecast(case)}",
        figures={
            "grown_bytes": grown,
            "bytes_per_second": case.bytes_per_second,
            "seconds_to_full": case.seconds_to_full,
        }
        | {name: part for name, part in case.grown.items() if part},
        advice=tuple(dict.fromkeys((*advice, known.POLICY_EARLIER))),
    )


def meaning(component: str, device_type: str | None) -> str:
    """Return what a component is, on this kind of device."""
    if component == "non_torch_bytes" and device_type == "cpu":
        return "On CPU that is the process's heap, its libraries and its stacks; release gives back what is free in it."
    return known.COMPONENT_MEANING[component]


def for_growth(component: str, device_type: str | None) -> tuple[Advice, ...]:
    """Return what keeps a component small that grew."""
    release = (known.RELEASE,) if component == "non_torch_bytes" else ()
    return (*release, *known.for_component(component, device_type))


def _counts(part: int, of: int) -> bool:
    return part >= MINOR_SHARE * of


def _ranks(case: Case) -> str:
    return "one rank" if len(case.ranks) == 1 else f"{len(case.ranks)} ranks"


def _forecast(case: Case) -> str:
    slope = case.bytes_per_second
    if slope is None or case.is_load:
        return ""
    forecast = f" In the last minute it moved by {mib_text(slope * 60, signed=True)} a minute"
    if case.seconds_to_full is not None:
        forecast += f"; at that pace the first device is full after {case.seconds_to_full / 60:,.1f} minutes"
    return f"{forecast}."


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
    more = high - low
    is_alike = heaviest.now.total_bytes == lightest.now.total_bytes
    if more <= max(SKEW_BYTES, int(SKEW_RATIO * (heaviest.now.total_bytes or 0))) or not is_alike:
        return None
    parts = {
        name: mine - other
        for name in COMPONENTS
        if (mine := part_of(heaviest.peak, name)) is not None and (other := part_of(lightest.peak, name)) is not None
    }
    where = max(parts, key=lambda name: parts[name]) if parts else None
    mostly = f" Most of the difference is in {component_title(where)}." if where and parts[where] > 0 else ""
    when = "at its peak " if case.is_load else ""
    return Finding(
        name="skew",
        weight="clue",
        title=f"{when}{heaviest.name} used {mib_text(more)} more than {lightest.name}",
        text=(
            f"{heaviest.name.capitalize()} used {mib_text(high)}, {lightest.name} {mib(low)}.{mostly} The fullest "
            "rank runs out first, and takes the others with it; settings hold for all alike, so set them by it."
        ),
        figures={f"{rank.name} used_bytes": each for each, rank in used} | {"difference_bytes": more},
        advice=(known.OTHER_PROCESSES, known.GPU_MEMORY_UTILIZATION),
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
    kv_cache,
)
