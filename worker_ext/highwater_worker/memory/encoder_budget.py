"""The scheduler's budget for the encoder: what it may compute in one step, and what its cache may keep.

Model runner V1 keeps vLLM's `MultiModalBudget`. V2 makes one for the profile alone (vllm 0.32.0
v1/worker/gpu/model_runner.py:995), so it is noticed there (`StartPhases`). It is not known where V2 profiles without
the encoder: before 0.27 (vllm 0.23.0 v1/worker/gpu/model_runner.py:629), and with `skip_mm_profiling`. The scheduler's
configuration does not stand in for it: one item of the largest kind fits in any case (vllm 0.32.0
v1/core/encoder_cache_manager.py:360).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from highwater_worker.attributes import first_of, look_up, whole

_MAX_MODALITIES = 8


def describe_budget(budget: object) -> dict[str, Any]:
    """Return a `MultiModalBudget` in embeddings and items; of None all is null."""
    return {
        "compute_budget": whole(look_up(budget, "encoder_compute_budget")),
        "cache_size": whole(look_up(budget, "encoder_cache_size")),
        # Renamed in 0.15; each is a mapping by modality.
        "max_tokens_per_item": _by_modality(budget, "mm_max_toks_per_item", "max_tokens_by_modality"),
        "max_items_per_prompt": _by_modality(budget, "mm_max_items_per_prompt", "max_items_per_prompt_by_modality"),
        "max_items_per_batch": _by_modality(budget, "mm_max_items_per_batch", "max_items_per_batch_by_modality"),
    }


def encoder_budget(worker: object, noticed: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the budget as `describe_budget` does, V2's as `noticed` in its profile; None without an encoder."""
    runner = look_up(worker, "model_runner")
    if kept := look_up(runner, "mm_budget"):
        return describe_budget(kept)
    # V2's first stage of a multimodal model has this, and no other worker.
    return None if look_up(runner, "model_state", "encoder_runner") is None else noticed or describe_budget(None)


def _by_modality(budget: object, *names: str) -> dict[str, int | None] | None:
    counts = first_of(budget, *names, convert=lambda value: value if isinstance(value, dict) else None)
    return None if counts is None else {str(key)[:20]: whole(counts[key]) for key in list(counts)[:_MAX_MODALITIES]}
