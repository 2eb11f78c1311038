"""The rules of a start that differ by version, as far as a running engine's budget and plan follow them. Pure.

`docs/ascend_rules.toml` says where those of vllm-ascend were read. Releases after the newest that was read are taken to
keep its rules.
"""

from __future__ import annotations

import math
from typing import Final

from kvplan.figure import MIB
from kvplan.generations import Span
from kvplan.versions import Release

# vllm-ascend's profile does not count the multimodal encoder.
ASCEND_SKIPS_ENCODER: Final = Span((0, 11), (0, 13))
ASCEND_TAKES_KV_CACHE_BYTES: Final = Span((0, 19))  # `--kv-cache-memory-bytes`, which it ignored before
# It fits what the profile left to its own layout of the KV cache, before it stores the figure, and once more before it
# returns it (vllm-ascend 0.27.1rc1, 0.30.0rc2 worker/worker.py `determine_available_memory`).
ASCEND_RESCALES: Final = Span((0, 24))
# Model runner V2 profiles the encoder (vllm 0.27.0 v1/worker/gpu/model_runner.py:702; not in 0.26.0, there line 673).
V2_PROFILES_ENCODER: Final = Span((0, 27))
# What vLLM's log leaves free beside the KV cache that it suggests (vllm 0.32.0 v1/worker/gpu_worker.py:994).
SUGGESTION_MARGIN: Final = 150 * MIB


def requested_bytes(total_bytes: int, utilization: float, release: Release, platform: str) -> int:
    """Return vLLM's budget of a device, with its own rounding.

    `v1/worker/utils.py: request_memory` rounds up from 0.14 on; before, and on Ascend, the fraction is kept and lost
    when the KV cache's bytes are made whole.
    """
    product = total_bytes * utilization
    return math.ceil(product) if release >= (0, 14) and platform != "ascend" else int(product)
