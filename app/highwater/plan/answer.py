"""A plan as JSON for programs, and as text for a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any, Final

from highwater.plan.figure import Grade
from highwater.plan.flags import command_line, given_flags
from highwater.plan.offline import OfflinePlan
from highwater.units import size_text

SCHEMA: Final = 1
NOT_KNOWN: Final = "not known"


def plan_json(plan: OfflinePlan, place: str, oracle: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a plan for programs.

    Args:
        plan: The plan.
        place: The model, as it was named.
        oracle: What vLLM's own functions answered, where they were asked.
    """
    model, pool = plan.model, plan.pool
    known = plan.available_bytes is not None
    figures: dict[str, Any] = {
        "available_bytes": pool.available_bytes if known else None,
        "bytes_per_block": pool.bytes_per_block,
        "block_size": plan.resolved.blocks.attention,
        "blocks": pool.blocks if known else None,
        "groups": [asdict(group) for group in pool.groups],
        "tokens": pool.tokens if known else None,
        "max_concurrency": pool.max_concurrency if known else None,
        "needed_bytes": pool.needed_bytes,
        "fits": plan.fits,
        "max_model_len_that_fits": pool.max_model_len_that_fits if known else None,
    }
    low, high = plan.bounds or (None, None)
    bounds = {
        "available_bytes_low": None if low is None else low.available_bytes,
        "available_bytes_high": None if high is None else high.available_bytes,
        "blocks_low": None if low is None else low.blocks,
        "blocks_high": None if high is None else high.blocks,
    }
    grade = _grade(plan)
    always_exact = {"bytes_per_block", "block_size", "groups", "needed_bytes"}
    refusal = pool.refusal.message if known and pool.refusal is not None else None
    return {
        "schema": SCHEMA,
        "vllm_version": plan.generation.version,
        "platform": plan.resolved.given.platform,
        "model": {
            "architecture": model.architecture,
            "layers": model.layers,
            "max_position_embeddings": None if model.max_length is None else int(model.max_length),
        },
        "flags": dict(plan.resolved.shown()),
        "kv_cache": {
            **figures,
            **bounds,
            "refusal": refusal,
            "grades": {
                name: "exact" if name in always_exact else grade for name, value in figures.items() if value is not None
            },
        },
        "budget": None if plan.budget is None else plan.budget.as_json(),
        "command_line": command_line(given_flags(plan.resolved.given), place),
        "notes": list(plan.notes),
        "oracle": None if oracle is None else dict(oracle),
    }


def _grade(plan: OfflinePlan) -> Grade:
    """Return how the figures that follow from the available bytes are known."""
    return "exact" if plan.budget is None else plan.budget.available.grade


def plan_text(plan: OfflinePlan, oracle: Mapping[str, Any] | None = None) -> str:
    """Return a plan as a person reads it, and what vLLM's own functions answered where they were asked."""
    model, pool, limits = plan.model, plan.pool, plan.resolved.limits
    known, grade = plan.available_bytes is not None, _grade(plan)
    lines = [
        f"{model.architecture}, {model.layers} layers, vLLM {plan.generation.version}, {plan.resolved.given.platform}",
        _verdict(plan),
        "",
        *_budget_rows(plan),
        _row("KV cache of one rank", f"{size_text(pool.available_bytes)}, {grade}" if known else NOT_KNOWN),
        *_bound_rows(plan),
        _row("one block", f"{pool.bytes_per_block:,} bytes, {plan.resolved.blocks.attention:,} tokens"),
    ]
    if known:
        lines += [
            _row("blocks", f"{pool.blocks:,}, {grade}"),
            _row("tokens as vLLM prints them", NOT_KNOWN if pool.tokens is None else f"{pool.tokens:,}, {grade}"),
            _row(
                f"requests of {limits.max_model_len:,} tokens at once",
                NOT_KNOWN if pool.max_concurrency is None else f"{pool.max_concurrency:.2f}, {grade}",
            ),
        ]
    lines += [_row("one such request needs", size_text(pool.needed_bytes)), "", "groups of layers:"]
    for (kind, layers, padding, size, page, blocks), alike in groupby(
        pool.groups, lambda g: (g.kind, g.layers, g.padding_layers, g.block_size, g.page_bytes, g.blocks_per_request)
    ):
        count = len(list(alike))
        padded = f", room for {padding} more" if padding else ""
        lines.append(
            f"  {count} x {layers} {kind}{padded}: blocks of {size:,} tokens, {page:,} bytes a layer,"
            f" {blocks:,} for a request"
        )
    if oracle is not None:
        lines += ["", f"vLLM {oracle['vllm_version']} itself: {'; '.join(oracle['differences']) or 'the same figures'}"]
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    return "\n".join(lines)


def _verdict(plan: OfflinePlan) -> str:
    pool, length = plan.pool, plan.resolved.limits.max_model_len
    if plan.available_bytes is None:
        return f"Whether {length:,} tokens fit depends on the bytes for the KV cache, which are not known."
    if plan.fits:
        return f"It fits: vLLM starts with --max-model-len {length}."
    if plan.fits is None:
        return (
            f"It may not fit: one request of {length:,} tokens needs {size_text(pool.needed_bytes)}, and the bytes for"
            " the KV cache are an estimate with bounds on both sides of that. A measured start (--measured) or"
            " --kv-cache-memory-bytes decides it."
        )
    longest = pool.max_model_len_that_fits
    advice = f"the longest that fits is {longest:,}" if longest else "no length fits"
    return f"It does not fit: vLLM refuses to start with --max-model-len {length}; {advice}."


def _bound_rows(plan: OfflinePlan) -> list[str]:
    if plan.bounds is None:
        return []
    low, high = plan.bounds
    return [_row("  between", f"{size_text(low.available_bytes)} and {size_text(high.available_bytes)}")]


def _budget_rows(plan: OfflinePlan) -> list[str]:
    budget = plan.budget
    if budget is None:
        return []
    graphs = "graphs" if budget.graphs_are_subtracted else "graphs (this version does not subtract them)"
    parts = (
        ("weights", budget.weights),
        ("activation peak", budget.activation),
        ("outside torch", budget.non_torch),
        (graphs, budget.graphs),
    )
    return [
        _row("one card", size_text(budget.total_bytes)),
        _row("vLLM's share of it", size_text(budget.requested_bytes)),
        *(_row(f"  {title}", f"{size_text(part.bytes)}, {part.grade}") for title, part in parts),
    ]


def _row(title: str, value: str) -> str:
    return f"{title:<42}{value:>24}"
