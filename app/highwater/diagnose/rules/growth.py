"""Growth: what leaks between requests, what grew since ready, and which component it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from highwater.diagnose.advice import COMPONENT_MEANING, against_fragments, for_component
from highwater.diagnose.case import Case, RankCase
from highwater.diagnose.finding import Finding, Weight, finding
from highwater.diagnose.rules.device import has_run_out
from highwater.readings.growth import SeriesGrowth
from highwater.text.growth import leak_line, series_title
from highwater.text.growth import leaks as leaking
from highwater.text.table import component_title

# Of the growth: a component with so much is the one that grew; one with less than the minor share is not named.
MAIN_SHARE, MINOR_SHARE = 0.6, 0.1
_REACH: Final[Mapping[str, str]] = {
    "encoder_cache_bytes": ", which reset_mm_cache does not touch; trim or reset the encoder cache",
    "other_tensors_bytes": ", live tensors of PyTorch, which no remedy takes away",
    "torch_cached_bytes": ", which reset_mm_cache does not touch; release gives back what of it is releasable",
    "non_torch_bytes": ", which is not PyTorch's; release gives back what of it is the allocator's or a workspace's",
}


def without_expandable_segments(case: Case) -> Finding | None:
    """Report that memory outside PyTorch grew under images, on NPUs whose allocator has no expandable segments.

    Its platform's maintainers found fragments below PyTorch's allocator to be the cause (vllm-ascend issue 5339, pull
    request 5855). Where it is not known whether they are on, that is said, and how to see it.
    """
    grown = case.grown.get("non_torch_bytes", 0)
    ranks = [rank for rank in case.ranks if rank.now.may_fragment]
    is_ahead = case.kind == "ahead"
    if not ranks or (not is_ahead and (grown <= case.notable_bytes or not _had_images(case))):
        return None
    is_known = any(rank.now.launch.expandable_segments is False for rank in ranks)
    is_most = grown >= max(case.grown.values(), default=0)
    weight: Weight = "likely" if is_known and is_most and has_run_out(case) else "clue"
    shared_with = next((rank.now.shared_with for rank in ranks if rank.now.shared_with), None)
    return finding(
        "without_expandable_segments",
        weight="note" if is_ahead and not is_known else "clue" if is_ahead else weight,
        advice=for_growth("non_torch_bytes", case),
        ranks=ranks_text(ranks),
        is_known=is_known,
        is_asleep=any(rank.now.launch.sleep_mode for rank in ranks),
        shared_with=shared_with,
        grown=grown,
        non_torch=0 if is_ahead else max(rank.now.components.non_torch_bytes or 0 for rank in ranks),
    )


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
    return finding(
        "leaks",
        weight="clue" if case.kind in {"hung", "start_failed"} else "likely",
        advice=_against_leak(first, case),
        first=first,
        leak=leak_line(first),
        others=f"; so does {', '.join(map(series_title, found[1:]))}" if found[1:] else "",
        verdicts=". ".join(f"{series_title(one)}: {one.text}" for one in found),
    )


def _against_leak(series: SeriesGrowth, case: Case) -> tuple[str, ...]:
    if series.place == "asleep":
        return ("release_asleep", "restart_frees")
    if series.place == "device":
        is_outside = series.measure == "non_torch_bytes"
        return (*(_against_fragments(case) if is_outside else ()), "restart_frees", "policy_earlier")
    return ("restart_frees", "memory_limit") if series.unit == "bytes" else ("restart_frees",)


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
    if component == "non_torch_bytes" and device_type == "cpu":
        return "On CPU that is the process's heap, its libraries and its stacks; release gives back what is free in it."
    return COMPONENT_MEANING[component]


def for_growth(component: str, case: Case) -> tuple[str, ...]:
    names = for_component(component, case.device_type)
    if component != "non_torch_bytes":
        return names
    against = _against_fragments(case)
    is_alone = bool(against) and not any(rank.now.shared_with for rank in case.ranks)
    return (*against, "release", *(name for name in names if name != "other_processes" or not is_alone))


def _against_fragments(case: Case) -> tuple[str, ...]:
    ranks = [rank for rank in case.ranks if rank.now.may_fragment]
    if not ranks or not _had_images(case):
        return ()
    if all(rank.now.launch.expandable_segments is None for rank in ranks):
        return ("npu_see_segments", "npu_expandable_segments")
    return against_fragments(has_sleep_mode=any(rank.now.launch.sleep_mode for rank in ranks))


def ranks_text(ranks: Sequence[RankCase]) -> str:
    return "one rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
