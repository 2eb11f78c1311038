"""The encoder's side of the budget: its limits of computing and caching, in embeddings and bytes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from highwater.accounting.engine_budget import EngineBudget
from highwater.plan.budget import encoder_bytes
from highwater.plan.start_rules import ASCEND_SKIPS_ENCODER, V2_PROFILES_ENCODER
from highwater.readings.rank import EncoderUnprofiledBy, Launch, RankReading
from kvplan.errors import PlanError
from kvplan.generations import generation_of

# Pixels that one embedding stands for, along each side: patch size times the patches that are merged.
_PIXELS: Final[Mapping[str, int]] = {"Qwen2VL": 28, "Qwen2_5_VL": 28, "Qwen3VL": 32, "Qwen3_5": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderView:
    """The multimodal budget of one engine; ranks have the same. None: not known."""

    compute_budget: int | None  # the most embeddings that the encoder makes in one step
    cache_size: int | None  # in embeddings
    cache_bytes: int | None  # the same in bytes, on each rank
    # ``measured``: by the entries that it holds; ``estimated``: by the width of the model's embeddings, a lower bound
    # where a model keeps several layers of them.
    bytes_grade: str | None
    held_bytes: int | None  # now, on the fullest rank
    modality: str | None  # of the largest item
    item_tokens: int | None  # the embeddings of that item
    item_pixels: int | None  # the side of a square image of that size, where the model's rule is known
    items_in_cache: int | None  # the number of such items that fills the cache
    profiled_items: int | None  # the number that the start profiled at once
    is_profiled: bool | None  # the start took the encoder into account
    unprofiled_by: EncoderUnprofiledBy | None = None  # why it did not

    @property
    def item_side(self) -> str:
        """The sides of that image in words; empty where they are not known."""
        return "" if self.item_pixels is None else f", {self.item_pixels} x {self.item_pixels} pixels"


def encoder_view(budget: EngineBudget, reading: RankReading) -> EncoderView | None:
    encoder, held, size = budget.encoder, reading.encoder_cache, encoder_bytes(budget, reading)
    if encoder is None:
        return None
    largest = {name: size for name, size in (encoder.max_tokens_per_item or {}).items() if size}
    modality = max(largest, key=largest.__getitem__, default=None)
    tokens = None if modality is None else largest[modality]
    reason = unprofiled_by(budget, reading.device.type)
    is_skipped = reason is not None or budget.kv_cache.given_bytes is not None
    # Model runner V2 reports a budget only where it was seen to profile the encoder with it.
    is_v2 = budget.limits is not None and budget.limits.v2_runner
    seen = encoder.cache_size if is_v2 else budget.memory.peak_activation_bytes
    is_measured = held is not None and held.embeds
    return EncoderView(
        compute_budget=encoder.compute_budget,
        cache_size=encoder.cache_size,
        cache_bytes=size,
        bytes_grade=None if size is None else "measured" if is_measured else "estimated",
        held_bytes=None if held is None else held.device_bytes,
        modality=modality,
        item_tokens=tokens,
        item_pixels=_pixels(budget.architecture, modality, tokens),
        items_in_cache=None if tokens is None or encoder.cache_size is None else encoder.cache_size // tokens,
        profiled_items=None if modality is None else (encoder.max_items_per_batch or {}).get(modality),
        is_profiled=False if is_skipped else None if seen is None else True,
        unprofiled_by=reason,
    )


def unprofiled_by(budget: EngineBudget, device_type: str | None) -> EncoderUnprofiledBy | None:
    """Return why a start of a multimodal model did not count the encoder; ``None``: it did, or that is not known."""
    limits = budget.limits
    try:
        release = generation_of(budget.vllm_version or "").release
    except PlanError:
        release = ()
    if budget.encoder is not None and budget.encoder.skips_profiling:
        return "skip_mm_profiling"
    if limits is not None and limits.v2_runner and release and release not in V2_PROFILES_ENCODER:
        return "runner_v2"
    # One that has a peak on record has profiled it all the same.
    is_old_npu = device_type == "npu" and release in ASCEND_SKIPS_ENCODER
    return "vllm_ascend" if is_old_npu and budget.memory.peak_activation_bytes is None else None


def launch_of(budget: EngineBudget | None, reading: RankReading, version: str | None) -> Launch:
    """Return what a rank's worker was started with, by its report where it has one; ``version`` is vLLM's."""
    budget_or_version = budget if budget is not None else EngineBudget(vllm_version=version)
    limits, is_npu = budget_or_version.limits, reading.device.type == "npu"
    is_multimodal = reading.encoder_cache is not None and reading.device.type != "cpu"
    return Launch(
        expandable_segments=budget.expandable_segments if is_npu and budget is not None else None,
        sleep_mode=None if limits is None else limits.sleep_mode,
        kv_cache_given=None if budget is None else budget.kv_cache.given_bytes is not None,
        encoder_unprofiled_by=unprofiled_by(budget_or_version, reading.device.type) if is_multimodal else None,
    )


def _pixels(architecture: str | None, modality: str | None, tokens: int | None) -> int | None:
    if architecture is None or modality != "image" or tokens is None:
        return None
    side = math.isqrt(tokens)
    pixels = next((size for name, size in _PIXELS.items() if architecture.startswith(name)), None)
    return None if pixels is None or side * side != tokens else side * pixels
