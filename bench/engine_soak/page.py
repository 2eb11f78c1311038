"""A soak of an engine as figures and as a block of docs/figures.md, from its JSON; of a run that goes on too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.figure import Figure, Goal
from bench.page import figures_table, replaced

MB = 1_000_000
_AT_THE_ENDS = 5
"""Samples of which the median counts."""


def figures(run: Mapping[str, Any]) -> list[Figure]:
    """Return what was measured, each beside its goal."""
    sent, failed = sum(run["requests"]["sent"].values()), sum(run["requests"]["failed"].values())
    sizes = [sample["sidecar_rss_bytes"] / MB for sample in run["samples"]]
    mark, end = _at_mark(sizes), _median(sizes[-_AT_THE_ENDS:])
    return [
        _figure("Requests that failed", failed, 0, f"of {sent:,}"),
        _figure(
            "The sidecar's resident memory at the end, less that at a sixth of the run, MB",
            end - mark,
            8.0,
            f"{mark:.1f} and {end:.1f} MB; at most {max(sizes, default=0.0):.1f} MB",
        ),
    ]


def _figure(what: str, value: float, limit: float, spread: str) -> Figure:
    return Figure(what=what, value=value, unit="", goal=Goal("at most", limit), spread=spread, method="")


def _at_mark(sizes: Sequence[float]) -> float:
    start = len(sizes) // 6
    return _median(sizes[start : start + _AT_THE_ENDS])


def _median(values: Sequence[float]) -> float:
    return median(values) if values else float("nan")


def facts(run: Mapping[str, Any]) -> list[str]:
    """Return further numbers in sentences."""
    requests = run["requests"]
    by_kind = ", ".join(f"{count:,} {kind}" for kind, count in sorted(requests["sent"].items())) or "none"
    lines = [f"Requests: {by_kind}."]
    if requests["without_videos"] is not None:
        lines.append(f"No videos: the engine takes none ({requests['without_videos'][:160]}).")
    used = [sample["used_bytes"] / MB for sample in run["samples"] if sample["used_bytes"] is not None]
    if used:
        start = _median(used[:_AT_THE_ENDS])
        lines.append(f"The worker's memory: {start:,.0f} MB at first, {_median(used[-_AT_THE_ENDS:]):,.0f} MB at last.")
    lines += [f"Failed: {error}" for error in requests["errors"][:3]]
    if not run["complete"]:
        lines.append("**The run was not over when this was written.**")
    return lines


def with_run(text: str, run: Mapping[str, Any]) -> str:
    """docs/figures.md with the run between its marks, Markdown."""
    listed = "\n".join(f"- {line}" for line in facts(run))
    block = f"""
Written by `make soak MINUTES={run["minutes"]:g}` on {run["day"]}: {run["seconds"] / 60:.0f} minutes,
{run["clients"]} clients. Machine: {run["machine"]}; engine, sidecar and clients share it.

{figures_table(figures(run), "github")}

{listed}

"""
    return replaced(text, "engine run", "end of engine run", block)
