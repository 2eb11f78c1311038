"""A plan as JSON for programs, and as text for a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from highwater.units import size_text
from kvplan.figure import GRADES, Grade
from kvplan.flags import command_line, given_flags, vllm_flags

if TYPE_CHECKING:  # a plan of a config.json loads nothing of a running engine's
    from highwater.accounting.engine_budget import EncoderLimits
    from highwater.plan.kv_view import LiveEngine
    from highwater.plan.live import LivePlan
    from highwater.plan.offline import OfflinePlan
    from kvplan.pool import KvPool

SCHEMA: Final = 1
NOT_KNOWN: Final = "not known"
# They follow from the layers; the other figures of a pool are known as well as its bytes are.
_OF_LAYERS: Final = frozenset({"bytes_per_block", "block_size", "groups", "needed_bytes"})


def plan_json(plan: OfflinePlan, place: str, oracle: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`oracle` is vLLM's own answer; None: it was not asked."""
    model, resolved = plan.model, plan.resolved
    known, grade = plan.available_bytes is not None, _grade(plan)
    figures = _figures(plan.pool, resolved.blocks.attention, fits=plan.fits, known=known)
    low, high = plan.bounds or (None, None)
    grades = {**dict.fromkeys(figures, grade), **dict.fromkeys(_OF_LAYERS, "estimated" if resolved.doubts else "exact")}
    if known and plan.on_card is not None:
        grades["fits"] = "estimated"
    return {
        "schema": SCHEMA,
        "vllm_version": plan.generation.version,
        "platform": resolved.flags.platform,
        "model": {
            "architecture": model.architecture,
            "layers": model.layers,
            "max_position_embeddings": None if model.length.longest is None else int(model.length.longest),
        },
        "flags": {**vllm_flags(resolved.flags), "num_speculative_tokens": resolved.speculative_tokens},
        "kv_cache": {
            **figures,
            "available_bytes_low": None if low is None else low.available_bytes,
            "available_bytes_high": None if high is None else high.available_bytes,
            "blocks_low": None if low is None else low.blocks,
            "blocks_high": None if high is None else high.blocks,
            "refusal": plan.refusal or (plan.pool.refusal.message if known and plan.pool.refusal else None),
            "grades": {name: grades[name] for name, value in figures.items() if value is not None},
        },
        "budget": None if plan.budget is None else plan.budget.as_json(),
        "command_line": command_line(given_flags(resolved.given), place),
        "notes": list(plan.notes),
        "oracle": None if oracle is None else dict(oracle),
    }


def live_json(engine: LiveEngine, plan: LivePlan) -> dict[str, Any]:
    """Return a plan of a running engine for programs, as `POST /memory/plan` does."""
    pool, available = plan.pool, plan.available
    figures = _figures(pool, min(group.block_size for group in pool.groups), fits=plan.fits)
    # The pool as it runs is the engine's own; the same formulas on other numbers are known as well as the bytes.
    sized: Grade = max(available.grade, "exact" if plan.changed else "engine", key=GRADES.index)
    grades: dict[str, Grade] = {name: "exact" if name in _OF_LAYERS else sized for name in figures}
    if plan.card is not None:
        grades["fits"] = "estimated"
    return {
        "schema": SCHEMA,
        "vllm_version": engine.version,
        "platform": plan.flags.platform,
        "model": {
            "architecture": engine.workers[0].budget.architecture,
            "layers": len({name for layers in engine.layers for name in layers}),
            "max_position_embeddings": None,
        },
        "flags": asdict(plan.flags),
        "changed": dict(plan.changed),
        "kv_cache": {
            **figures,
            "available_bytes_low": available.low,
            "available_bytes_high": available.high,
            "refusal": plan.refusal,
            "on_card": None if plan.card is None else plan.card.why,
            "grades": {**grades, "available_bytes": available.grade},
        },
        "encoder": None if plan.encoder is None else _encoder_json(plan.encoder),
        "command_line": command_line(plan.changed) if plan.changed else None,
        "notes": [*available.notes, *plan.notes],
    }


def _figures(pool: KvPool, block_size: int, *, fits: bool | None, known: bool = True) -> dict[str, Any]:
    """Return a pool's figures; figures that depend on its bytes are None while the bytes are unknown."""
    return {
        "available_bytes": pool.available_bytes if known else None,
        "bytes_per_block": pool.bytes_per_block,
        "block_size": block_size,
        "blocks": pool.blocks if known else None,
        "groups": [asdict(group) for group in pool.groups],
        "tokens": pool.tokens if known else None,
        "max_concurrency": pool.max_concurrency if known else None,
        "needed_bytes": pool.needed_bytes,
        "fits": fits,
        "max_model_len_that_fits": pool.max_model_len_that_fits if known else None,
    }


def _encoder_json(encoder: EncoderLimits) -> dict[str, Any]:
    size, width, element = encoder.cache_size, encoder.embed_width, encoder.embed_bytes
    return {
        "compute_embeddings": encoder.compute_budget,
        "cache_embeddings": size,
        "cache_bytes": None if size is None or width is None or element is None else size * width * element,
        "items": {
            modality: {"max_embeddings": largest, "cached": size // largest if size is not None and largest else None}
            for modality, largest in (encoder.max_tokens_per_item or {}).items()
        },
    }


def _grade(plan: OfflinePlan) -> Grade:
    budget = None if plan.resolved.given.kv_cache_memory_bytes is not None else plan.budget
    return "estimated" if plan.resolved.doubts else "exact" if budget is None else budget.available.grade


def plan_text(plan: OfflinePlan, oracle: Mapping[str, Any] | None = None) -> str:
    model, pool, limits = plan.model, plan.pool, plan.resolved.limits
    known, grade = plan.available_bytes is not None, _grade(plan)
    lines = [
        f"{model.architecture}, {model.layers} layers, vLLM {plan.generation.version}, {plan.resolved.flags.platform}",
        _verdict(plan),
        "",
        *_budget_rows(plan),
        _row("KV cache of one rank", f"{size_text(pool.available_bytes)}, {grade}" if known else NOT_KNOWN),
    ]
    if plan.bounds is not None:
        lines.append(_row("  between", " and ".join(size_text(pool.available_bytes) for pool in plan.bounds)))
    lines.append(_row("one block", f"{pool.bytes_per_block:,} bytes, {plan.resolved.blocks.attention:,} tokens"))
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
        asked = f"vLLM {oracle['vllm_version']} itself, for this command line and the bytes of this plan"
        lines += ["", f"{asked}: {'; '.join(oracle['differences']) or 'the same KV cache'}"]
    if notes := [f"note: {note}" for note in plan.notes if note not in lines[1]]:
        lines += ["", *notes]
    return "\n".join(lines)


def _verdict(plan: OfflinePlan) -> str:
    pool, length = plan.pool, plan.resolved.limits.max_model_len
    refusal = plan.refusal
    if plan.budget is not None and plan.fits is False and not pool.blocks:
        refusal = refusal or plan.budget.refusal
    if refusal is not None:
        return f"It does not fit: {refusal}"
    if plan.available_bytes is None:
        return f"Whether {length:,} tokens fit depends on the bytes for the KV cache, which are not known."
    if plan.fits:
        return f"It fits: vLLM starts with --max-model-len {length}. {_outside(plan)}"
    if plan.fits is None and plan.on_card is not None and pool.fits:
        return f"It may not fit. {plan.on_card.why}"
    if plan.fits is None:
        return (
            f"It may not fit: one request of {length:,} tokens needs {size_text(pool.needed_bytes)}, and the bytes for"
            " the KV cache are an estimate with bounds on both sides of that. A measured start (--measured) or"
            " --kv-cache-memory-bytes decides it."
        )
    longest = pool.max_model_len_that_fits
    advice = f"the longest that fits is {longest:,}" if longest else "no length fits"
    return f"It does not fit: vLLM refuses to start with --max-model-len {length}; {advice}."


def _outside(plan: OfflinePlan) -> str:
    if plan.on_card is not None:
        return plan.on_card.why
    for_what = "for what no budget has, such as graphs beyond their estimate and the first large image or video"
    budget, share = plan.budget, plan.resolved.flags.gpu_memory_utilization
    if budget is None or share is None:
        return f"What is left {for_what}, is not known: no card is named."
    outside = budget.total_bytes - int(budget.total_bytes * share) - (plan.resolved.given.in_use_bytes or 0)
    beside = "" if plan.resolved.given.in_use_bytes is None else " and what others have in use"
    return f"Outside the share of {share}{beside} are {size_text(outside)}, {for_what}."


def _budget_rows(plan: OfflinePlan) -> list[str]:
    budget, share = plan.budget, plan.resolved.flags.gpu_memory_utilization
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
        *([] if share is None else [_row("vLLM's share of it", size_text(budget.requested_bytes))]),
        *(_row(f"  {title}", f"{size_text(part.bytes)}, {part.grade}") for title, part in parts),
    ]


def _row(title: str, value: str) -> str:
    return f"{title:<42}{value:>24}"
