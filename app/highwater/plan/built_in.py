"""The built-in's answer, in the form of vLLM's own: the newest version's defaults, for the commonest families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, astuple
from itertools import starmap
from typing import Any, Final

from highwater.plan.command_line import Line, parse
from highwater.plan.json_file import read_object
from highwater.plan.model_files import checkpoint_bytes, folder_of
from highwater.readings.schema import SCHEMA
from highwater_worker.plan import estimates
from highwater_worker.plan.cards import Card
from kvplan.builtin.start import Start, read_start
from kvplan.generations import generation_of
from kvplan.pool import plan_pool
from kvplan.versions import NEWEST_TESTED, text_of

MAX_CONFIG_BYTES: Final = 10_000_000
_CAPTURED: Final = 512
"""The largest batch of a graph by default."""


def answer_to(line: Line, card: Card | None, question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a question of docs/plan-by-vllm.md about a command line. Raises PlanError: it is not planned here."""
    parsed, total = parse(line), int(question.get("device_bytes") or 0)
    folder = folder_of(parsed.model)
    config = read_object(folder / "config.json", MAX_CONFIG_BYTES, "the model's config.json")
    named = {} if card is None else {
        "device_name": card.name, "compute_capability": ".".join(map(str, card.capability))
    }  # fmt: skip
    flags = parsed.flags(device_bytes=total or None, **named)
    start = read_start(config, flags, checkpoint_bytes=checkpoint_bytes(folder))
    found = _found(start, parsed.model or "")
    if line.environ:
        found["guessed"].append(f"the environment {', '.join(line.environ)} was not looked at")
    if parsed.ignored:
        found["guessed"].append(f"no memory depends on {', '.join(parsed.ignored)}")
    given = question.get("kv_cache_bytes") or flags.kv_cache_memory_bytes
    share, others = start.flags.gpu_memory_utilization or 0.0, int(question.get("in_use_bytes") or 0)
    requested = math.ceil(total * share)
    left: list[estimates.Figure] = []
    if given is not None:
        left = [estimates.exact(int(given), "given")] * len(start.workers)
    elif total and requested > total - others:
        message = f"{requested:,} bytes, --gpu-memory-utilization {share} of the card, are more than the others leave"
        return found | {"status": "refused", "refusal": {"stage": "the card", "message": message}}
    elif total and start.weights and start.activation is not None:
        parts = _parts(start, parsed.given, question.get("measured") or {})
        left = [estimates.left(requested, part) for part in parts]
        rows = [{name: figure._asdict() for name, figure in part.items()} for part in parts]
        found["budget"] = {"total_bytes": total, "requested_bytes": requested, "ranks": rows}
    elif total:
        found["not_counted"] = [f"{start.why_unknown}"]
    found["kv_cache"] = pool = _pool(start, left)
    fits = pool["fits"]
    found["status"] = "not_known" if not left else "may_not_fit" if fits is None else "fits" if fits else "does_not_fit"
    return found


def _found(start: Start, model: str) -> dict[str, Any]:
    flags = start.flags
    weights = [{"rank": rank, "weights": astuple(figure)} for rank, figure in enumerate(start.weights)]
    return {
        "schema": SCHEMA,
        "versions": {"vllm": text_of(NEWEST_TESTED)},
        "architecture": start.architecture,
        "config": {
            "model": {"model": model, "max_model_len": start.limits.max_model_len, "dtype": flags.dtype},
            "cache": {"gpu_memory_utilization": flags.gpu_memory_utilization, "cache_dtype": flags.kv_cache_dtype},
            "parallel": {name: getattr(flags, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")},
            "scheduler": {name: getattr(flags, name) for name in ("max_num_batched_tokens", "max_num_seqs")},
        },
        "ranks": weights,
        "pretended": [],
        "not_counted": [],
        "guessed": [*start.notes, *start.doubts],
        "log": [],
    }


def _parts(start: Start, given: Mapping[str, Any], measured: Mapping[str, int]) -> list[dict[str, estimates.Figure]]:
    """Return what a start takes of each stage's card before the KV cache; ``measured`` replaces it, in bytes."""
    flags = start.flags
    world = flags.tensor_parallel_size * flags.pipeline_parallel_size * flags.data_parallel_size
    batch = 0 if given.get("enforce_eager") else given.get("max_cudagraph_capture_size", _CAPTURED)
    tokens = 4 * start.limits.max_num_seqs * start.limits.max_model_len
    of_all = {
        "activation": estimates.Figure(*astuple(start.activation)) if start.activation else None,
        "non_torch": estimates.outside_torch(is_alone=world == 1, is_npu=False),
        "graphs": estimates.graphs(
            layers=start.layers, has_experts=start.has_experts, tensor_parallel_size=flags.tensor_parallel_size,
            largest_batch=min(batch, 2 * (flags.max_num_seqs or batch)),
        ),
        "buffers": estimates.Figure(tokens, tokens, tokens + (1 << 20), "estimated", "each request's tokens"),
        **{name: estimates.measured(size, "a start measured it") for name, size in measured.items()},
    }  # fmt: skip
    known = {name: figure for name, figure in of_all.items() if figure is not None}
    return [{"weights": weights, **known} for weights in starmap(estimates.Figure, map(astuple, start.weights))]


def _pool(start: Start, left: list[estimates.Figure]) -> dict[str, Any]:
    generation = generation_of(text_of(NEWEST_TESTED))

    def pool(sizes: list[int]) -> dict[str, Any]:
        made = plan_pool(start.workers, sizes or [1 << 50] * len(start.workers), start.limits, generation)
        return {
            "fits": made.fits,
            "refusal": None if made.refusal is None else made.refusal.message,
            "available_bytes": made.available_bytes,
            "bytes_per_block": made.bytes_per_block,
            "block_size": min(group.block_size for group in made.groups),
            "blocks": made.blocks,
            "tokens": made.tokens,
            "max_concurrency": made.max_concurrency,
            "needed_bytes": made.needed_bytes,
            "max_model_len_that_fits": made.max_model_len_that_fits,
            "max_model_len": start.limits.max_model_len,
            "groups": [asdict(group) for group in made.groups],
        }

    return estimates.kv_cache(left, pool, "estimated" if start.doubts else "exact")
