"""The command line that a plan is for: vLLM's own flags, with each version's defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Platform: TypeAlias = Literal["cuda", "ascend", "cpu"]

DEFAULT_CAPABILITY: Final = "9.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The flags of a command line; None: not given, so that vLLM's default of that version holds.

    Names are vLLM's, but for `platform`, `device_bytes` (of one card), `device_name` (vLLM tells an A100 by it) and
    `compute_capability` (of the CUDA card, such as ``9.0``, which decides MLA's kernel; None: 9.0). Bytes are
    integers, a share is 0 to 1.
    """

    platform: Platform = "cuda"
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    device_bytes: int | None = None
    device_name: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    disable_hybrid_kv_cache_manager: bool = False
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    mamba_block_size: int | None = None
    mamba_cache_mode: str | None = None
    speculative_config: str | None = None
    limit_mm_per_prompt: Mapping[str, Any] | None = None  # by modality a count, or an object with one
    compute_capability: str | None = None

    @property
    def compute_capability_major(self) -> int:
        return int((self.compute_capability or DEFAULT_CAPABILITY).partition(".")[0])
