"""Growth: what leaks between requests, what grew since ready, and which component it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from highwater.diagnose.advice import COMPONENT_MEANING, for_component
from highwater.diagnose.case import Case
from highwater.diagnose.finding import Finding, finding
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
        pace=slope * 60 if slope and not case.is_load else None,
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
