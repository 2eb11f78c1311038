"""Differences of vllm-ascend from vLLM that change a plan, each with the releases that have it.

`docs/ascend_rules.toml` says where each was read, and lists those that change nothing here. Releases after the newest
that was read are taken to keep its rules.
"""

from __future__ import annotations

from typing import Final

from kvplan.errors import PlanError
from kvplan.generations import Span
from kvplan.versions import Release

KERNEL_BLOCK: Final = 128
# Where layers are in several groups, the bytes are scaled down by a rule that is not modelled.
SCALES_SEVERAL_GROUPS: Final = Span((0, 28))
# Sliding windows are sized as full attention.
KEEPS_SLIDING_AS_FULL: Final = Span((0, 11), (0, 14))
# The start's profile does not count the multimodal encoder.
SKIPS_ENCODER: Final = Span((0, 11), (0, 13))
# Everything on the card that is not torch's is taken off the KV cache.
COUNTS_THE_WHOLE_CARD: Final = Span((0, 11), (0, 15))
TAKES_KV_CACHE_MEMORY_BYTES: Final = Span((0, 19))
SUBTRACTS_GRAPHS: Final = Span((0, 21), (0, 23))
# torch's allocator has expandable segments by default: it splits every block.
EXPANDABLE_SEGMENTS: Final = Span((0, 14))
_ALIGNED_HYBRID: Final = "qwen3_next"


def block_size(given: int | None, *, reuses_blocks: bool) -> int:
    """Tokens of one block of a model without states; ``reuses_blocks``: prefix caching or chunked prefill is on."""
    return KERNEL_BLOCK if given is None or reuses_blocks else given


def check_hybrid(release: Release, model_type: str) -> None:
    """Raises PlanError: vllm-ascend aligns attention and Mamba pages by rules that are not modelled, or not at all."""
    if release >= (0, 16):
        raise PlanError("--platform: 'ascend'; vllm-ascend from 0.16 on lays out a hybrid's states in a way of its own")
    if model_type != _ALIGNED_HYBRID:
        raise PlanError(
            f"--platform: 'ascend'; vllm-ascend up to 0.15 keeps the larger blocks that a hybrid's states need for"
            f" {_ALIGNED_HYBRID} only, and this model is {model_type!r}"
        )
