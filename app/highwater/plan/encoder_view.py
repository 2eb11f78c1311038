"""The encoder's side of the budget: its limits of computing and caching, in embeddings and bytes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from highwater.accounting.engine_budget import EngineBudget
from highwater.plan import ascend
from highwater.plan.budget import encoder_bytes
from highwater.readings.rank import RankReading

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


def encoder_view(budget: EngineBudget, reading: RankReading) -> EncoderView | None:
    """Explain the encoder's budget; ``None`` for a model of text."""
    encoder = budget.encoder
    if encoder is None:
        return None
    largest = {name: size for name, size in (encoder.max_tokens_per_item or {}).items() if size}
    modality = max(largest, key=lambda name: largest[name], default=None)
    tokens = None if modality is None else largest[modality]
    held = reading.encoder_cache
    is_measured = held is not None and bool(held.embeds)
    size = encoder_bytes(budget, reading)
    batch = encoder.max_items_per_batch or {}
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
        profiled_items=None if modality is None else batch.get(modality),
        is_profiled=_is_profiled(budget, reading),
    )


def _is_profiled(budget: EngineBudget, reading: RankReading) -> bool | None:
    encoder, memory = budget.encoder, budget.memory
    if encoder is not None and encoder.skips_profiling:
        return False
    if budget.kv_cache.given_bytes is not None:
        return False
    if reading.device.type == "npu" and memory.peak_activation_bytes is None:
        # Some versions are known to size the pool as if the encoder needed nothing.
        return False if ascend.skips_encoder(budget.vllm_version) else None
    return True if memory.peak_activation_bytes is not None else None


def _pixels(architecture: str | None, modality: str | None, tokens: int | None) -> int | None:
    if architecture is None or modality != "image" or tokens is None:
        return None
    side = math.isqrt(tokens)
    pixels = next((size for name, size in _PIXELS.items() if architecture.startswith(name)), None)
    return None if pixels is None or side * side != tokens else side * pixels
