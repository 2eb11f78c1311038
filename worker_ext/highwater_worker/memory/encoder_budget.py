"""The engine's limits of computing and caching encoder outputs, in embeddings.

The larger of one step and one item of the largest kind (vllm 0.32.0 v1/core/encoder_cache_manager.py:359). Model runner
V1 keeps the object, V2 only passes it on as it profiles the encoder.
"""

from __future__ import annotations

from typing import Any

from highwater_worker.attributes import first_of, look_up, whole

_MAX_MODALITIES = 8


def encoder_budget(worker: object, start: object) -> dict[str, Any]:
    """Return the limits, of a `StartPhases` under V2; empty where there are none, or where V2 made them unseen."""
    kept = look_up(worker, "model_runner", "mm_budget")
    return describe_budget(kept) if kept else look_up(start, "encoder_budget") or {}


def describe_budget(budget: object) -> dict[str, Any]:
    return {
        "compute_budget": whole(look_up(budget, "encoder_compute_budget")),
        "cache_size": whole(look_up(budget, "encoder_cache_size")),
        # Renamed in 0.15; each is a mapping by modality.
        "max_tokens_per_item": _by_modality(budget, "mm_max_toks_per_item", "max_tokens_by_modality"),
        "max_items_per_prompt": _by_modality(budget, "mm_max_items_per_prompt", "max_items_per_prompt_by_modality"),
        "max_items_per_batch": _by_modality(budget, "mm_max_items_per_batch", "max_items_per_batch_by_modality"),
    }


def _by_modality(budget: object, *names: str) -> dict[str, int | None] | None:
    counts = first_of(budget, *names, convert=lambda value: value if isinstance(value, dict) else None)
    return None if counts is None else {str(key)[:20]: whole(counts[key]) for key in list(counts)[:_MAX_MODALITIES]}
