"""What grew: leaks between requests, since ready, by component; and the caches that vLLM keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from highwater.diagnose.case import Case, RankCase
from highwater.diagnose.evidence import highest
from highwater.diagnose.finding import COMPONENT_MEANING, Finding, Weight, finding
from highwater.diagnose.rules.device import has_run_out
from highwater.growth.words import leak_line, series_title
from highwater.growth.words import leaks as leaking
from highwater.model.components import component_title
from highwater.model.rank import EncoderUnprofiledBy, device_traits

# Of the growth: a component with so much is the one that grew; one with less than the minor share is not named.
MAIN_SHARE, MINOR_SHARE = 0.6, 0.1
_REACH: Final[Mapping[str, str]] = {
    "encoder_cache_bytes": ", which reset_mm_cache does not touch; trim or reset the encoder cache",
    "other_tensors_bytes": ", live tensors of PyTorch, which no remedy takes away",
    "torch_cached_bytes": ", which reset_mm_cache does not touch; release gives back what of it is releasable",
    "non_torch_bytes": ", which is not PyTorch's; release gives back what of it is the allocator's or a workspace's",
}
_AGAINST: Final[Mapping[str, tuple[str, ...]]] = {
    "encoder_cache_bytes": ("reset_encoder_cache", "trim_encoder_cache", "max_num_batched_tokens", "policy_earlier"),
    "other_tensors_bytes": ("limit_mm_per_prompt", "max_num_batched_tokens", "gpu_memory_utilization"),
    "torch_cached_bytes": ("release",),
    "non_torch_bytes": ("other_processes", "gpu_memory_utilization"),
}


def without_expandable_segments(case: Case) -> Finding | None:
    """Report that memory outside PyTorch grew under images, on NPUs whose allocator has no expandable segments.

    Its platform's maintainers found fragments below PyTorch's allocator to be the cause (vllm-ascend issue 5339, pull
    request 5855). Where it is not known whether they are on, that is said, and how to see it.
    """
    grown = case.grown.get("non_torch_bytes", 0)
    ranks = _fragmenting(case)
    is_ahead = case.kind == "start"
    if not ranks or (not is_ahead and (grown <= case.notable_bytes or not _had_images(case))):
        return None
    is_known = any(rank.now.launch.expandable_segments is False for rank in ranks)
    is_most = grown >= max(case.grown.values(), default=0)
    weight: Weight = "likely" if is_known and is_most and has_run_out(case) else "clue"
    shared_with = next((rank.now.shared_with for rank in ranks if rank.now.shared_with), None)
    return finding(
        "without_expandable_segments",
        weight="note" if is_ahead and not is_known else "clue" if is_ahead else weight,
        advice=_against_fragments(case) if is_ahead else for_growth("non_torch_bytes", case),
        ranks=ranks_text(ranks),
        is_known=is_known,
        is_asleep=any(rank.now.launch.sleep_mode for rank in ranks),
        shared_with=shared_with,
        grown=grown,
        non_torch=0 if is_ahead else max(rank.now.components.non_torch_bytes or 0 for rank in ranks),
    )


def _fragmenting(case: Case) -> list[RankCase]:
    """Return the NPUs whose memory images may fragment; at its start an engine shows its encoder by its budget."""
    has_encoder = case.explanation is not None and case.explanation.encoder is not None
    return [
        rank
        for rank in case.ranks
        if rank.now.may_fragment
        or (
            has_encoder
            and rank.now.device.traits.fragments_below_allocator
            and rank.now.launch.expandable_segments is False
        )
    ]


def _had_images(case: Case) -> bool:
    """Return whether items were encoded, as far as is known: without a processor cache the engine counts none."""
    caches = [reading.encoder_cache for rank in case.ranks for reading in (rank.first, rank.peak, rank.now) if reading]
    held = any(cache is not None and (cache.entries or cache.device_bytes or cache.host_bytes) for cache in caches)
    return held or case.load.work.images != 0


def leaks(case: Case) -> Finding | None:
    found = leaking(case.series)
    if not found:
        return None
    first = found[0]
    if first.place == "asleep":
        advice: tuple[str, ...] = ("release_asleep", "restart_frees")
    elif first.place == "device":
        is_outside = first.measure == "non_torch_bytes"
        advice = (*(_against_fragments(case) if is_outside else ()), "restart_frees", "policy_earlier")
    else:
        advice = ("restart_frees", "memory_limit") if first.unit == "bytes" else ("restart_frees",)
    return finding(
        "leaks",
        weight="clue" if case.kind in {"hung", "start_failed"} else "likely",
        advice=advice,
        first=first,
        leak=leak_line(first),
        others=f"; so does {', '.join(map(series_title, found[1:]))}" if found[1:] else "",
        verdicts=". ".join(f"{series_title(one)}: {one.text}" for one in found),
    )


def growth(case: Case) -> Finding | None:
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
        advice=(*(for_growth(name, case) if parts else ()), "policy_earlier"),
        ranks=ranks_text(case.ranks),
        since=case.since,
        components=components,
        rest=", ".join(shares[1:]) if is_main else "",
        meaning=meaning(name, case.device_type) if parts else "",
        pace=slope * 60 if slope and not case.is_load else None,
        forecast=""
        if seconds is None
        else f"; at that pace the first device is full after {seconds / 60:,.1f} minutes",
    )


def meaning(component: str, device_type: str | None) -> str:
    if component == "non_torch_bytes" and device_traits(device_type).is_host_memory:
        return "On CPU that is the process's heap, its libraries and its stacks; release gives back what is free in it."
    return COMPONENT_MEANING[component]


def for_growth(component: str, case: Case) -> tuple[str, ...]:
    names, traits = _AGAINST.get(component, ()), device_traits(case.device_type)
    if component == "torch_cached_bytes":
        return (*names, *traits.against_fragmentation)
    if component != "non_torch_bytes":
        return names
    names = () if traits.is_host_memory else (*names, *traits.against_non_torch)
    against = _against_fragments(case)
    is_alone = bool(against) and not any(rank.now.shared_with for rank in case.ranks)
    return (*against, "release", *(name for name in names if name != "other_processes" or not is_alone))


def _against_fragments(case: Case) -> tuple[str, ...]:
    ranks = _fragmenting(case)
    if not ranks or (case.kind != "start" and not _had_images(case)):
        return ()
    if all(rank.now.launch.expandable_segments is None for rank in ranks):
        return ("npu_see_segments", "npu_expandable_segments")
    has_sleep_mode = any(rank.now.launch.sleep_mode for rank in ranks)
    return ("npu_segments_or_sleep", "npu_max_split") if has_sleep_mode else ("npu_expandable_segments",)


def ranks_text(ranks: Sequence[RankCase]) -> str:
    return "one rank" if len(ranks) == 1 else f"{len(ranks)} ranks"


# --- the caches: encoder outputs and KV blocks ---

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
        advice=("max_num_batched_tokens",) if case.is_load else for_growth("encoder_cache_bytes", case),
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
    """Report a start that sized the KV cache as if the encoder needed no memory, by its budget where that is known."""
    view = None if case.explanation is None else case.explanation.encoder
    reasons = (rank.now.launch.encoder_unprofiled_by for rank in case.ranks)
    by = next((reason for reason in reasons if reason is not None), None)
    if view is not None and view.is_profiled is False:
        by = by or view.unprofiled_by
    elif by is None:
        return None
    if view is not None and view.cache_bytes == 0:
        return None
    ranks = [rank for rank in case.ranks if rank.now.launch.encoder_unprofiled_by == by] or list(case.ranks)
    grown = sum(max(case.grown.get(name, 0), 0) for name in ("encoder_cache_bytes", "other_tensors_bytes"))
    has_grown, is_start = grown > case.notable_bytes, case.kind == "start"
    capacity, _ = highest(ranks, _capacity_bytes) or (None, None)
    return finding(
        "encoder_not_profiled",
        weight="likely" if is_start or (has_grown and has_run_out(case)) else "clue",
        advice=(
            # A KV cache of a given size is not made smaller by what a profile finds.
            *(() if by is None or case.is_pool_given else (AGAINST_UNPROFILED[by],)),
            *("max_num_batched_tokens", "limit_mm_per_prompt"),
            "kv_cache_memory_bytes" if is_start else "gpu_memory_utilization",
        ),
        rank=ranks[0].name,
        by=None if by is None else WHY_UNPROFILED[by],
        cache_bytes=capacity if view is None else view.cache_bytes,
        held_bytes=max((_cached_bytes(rank) or 0) for rank in ranks) if view is None else view.held_bytes,
        embeddings=None if view is None else view.cache_size,
        is_given=case.is_pool_given,
        grown=grown if has_grown else None,
    )


def kv_cache_full(case: Case) -> Finding | None:
    is_full = (case.load.kv_cache_usage_ratio or 0.0) >= KV_FULL_RATIO
    return finding("kv_cache_full", load=case.load) if is_full else None
