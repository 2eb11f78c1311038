"""Reports as text tables for a terminal. Formats, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from app.attribution import COMPONENTS
from app.components import BY_NAME
from app.readings import Device, MissingRank, RankReading, Report
from app.units import UNKNOWN, mib


def component_title(name: str) -> str:
    """``kv_cache_bytes`` as ``KV cache``, and other sizes likewise in words."""
    return BY_NAME[name].title if name in BY_NAME else name.removesuffix("_bytes").replace("_", " ")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table, the first column left, the others right."""
    align = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers, tablefmt="simple", colalign=align if rows else None, disable_numparse=True)


def device_title(device: Device) -> str:
    """``npu:0``, or ``cpu``."""
    kind = device.type or "unknown"
    return kind if device.index is None else f"{kind}:{device.index}"


def rank_title(dp_rank: int | None, rank: int | None, unknown: str = "?") -> str:
    """``1``, or ``2.1`` in data-parallel engine 2: each engine numbers its ranks from 0."""
    number = unknown if rank is None else str(rank)
    return f"{dp_rank}.{number}" if dp_rank else number


def missing_text(ranks: Sequence[MissingRank]) -> str:
    """Missing ranks by place, which those too have that were never heard of: ``dp 1 pp 0 tp 0 (dead)``."""
    return ", ".join(f"dp {rank.dp_rank} pp {rank.pp_rank} tp {rank.tp_rank} ({rank.status})" for rank in ranks)


def report_text(report: Report) -> str:
    """The report as an operator reads it at a terminal, in MiB."""
    parts = [_headline(report)]
    if report.engine.hint:
        parts.append(f"hint: {report.engine.hint}")
    if report.ranks:
        parts.append(_ranks_table(report.ranks))
        parts.extend(f"note: rank {r.rank}: {n.name}: {n.reason}" for r in report.ranks for n in r.notes)
    parts.append(_footer(report))
    return "\n".join(part for part in parts if part) + "\n"


def _headline(report: Report) -> str:
    engine = report.engine
    what = f"vLLM {engine.version or '(version unknown)'} {engine.model or ''}".rstrip()
    ranks = f"{report.ranks_reported} of {report.ranks_expected if report.ranks_expected is not None else '?'} ranks"
    age = "never read" if report.age_seconds is None else f"read {report.age_seconds:.1f} s ago"
    return f"{what} at {engine.url}: {engine.state}, {ranks}, {age}{' (STALE)' if report.stale else ''}"


def _ranks_table(ranks: Sequence[RankReading]) -> str:
    headers = ["MiB", *(f"rank {rank_title(rank.dp_rank, rank.rank, UNKNOWN)}" for rank in ranks)]
    rows = [
        ["device", *(device_title(rank.device) for rank in ranks)],
        ["total", *(mib(rank.total_bytes) for rank in ranks)],
        ["used", *(mib(rank.used_bytes) for rank in ranks)],
    ]
    rows += [
        [f"- {component_title(name)}", *(mib(getattr(rank.components, name)) for rank in ranks)] for name in COMPONENTS
    ]
    rows += [
        ["releasable", *(mib(rank.releasable_bytes) for rank in ranks)],
        ["free", *(mib(rank.free_bytes) for rank in ranks)],
        ["used ratio", *(UNKNOWN if rank.used_ratio is None else f"{rank.used_ratio:.3f}" for rank in ranks)],
    ]
    return table(headers, rows)


def _footer(report: Report) -> str:
    lines = []
    cache = report.encoder_cache
    if cache is not None:
        capacity = "" if cache.capacity_embeds is None else f", capacity {cache.capacity_embeds:,} embeddings"
        lines.append(
            f"encoder cache: {cache.entries} entries, {mib(cache.device_bytes)} MiB on devices, "
            f"{mib(cache.host_bytes)} MiB on the host{capacity}"
        )
    if report.growth.since_ready_bytes is not None:
        slope = report.growth.bytes_per_second
        pace = "" if slope is None else f", {mib(slope, signed=True)} MiB/s over the last minute"
        lines.append(f"growth: {mib(report.growth.since_ready_bytes, signed=True)} MiB since ready{pace}")
    engine = report.engine
    if engine.requests_running is not None:
        usage = "" if engine.kv_cache_usage_ratio is None else f", KV cache {engine.kv_cache_usage_ratio:.0%} used"
        lines.append(f"requests: {engine.requests_running} running, {engine.requests_waiting or 0} waiting{usage}")
    if report.policy is not None:
        lines.append(f"policy: {report.policy.level} ({report.policy.mode}): {report.policy.summary}")
    return "\n".join(lines)
