"""The part of an engine's configuration that the size of its KV cache depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The values of `VllmConfig` that vLLM's KV cache sizing reads, with vLLM's defaults filled in.

    Attributes:
        max_model_len: The longest sequence, in tokens.
        max_num_batched_tokens: The tokens of one step.
        max_num_seqs: The requests of one step.
        async_scheduling: The next step is scheduled while one runs: twice as many tokens are under way.
        decode_context_parallel_size: Over how many ranks the tokens of one sequence are spread.
        prefill_context_parallel_size: The same for the prefill.
        num_gpu_blocks_override: The number of blocks that was ordered; None: what fits.
        prefix_caching: Whether blocks of ended requests are kept for the next.
        mamba_cache_mode: Which states are kept: ``none``, ``align`` or ``all``.
        hybrid_manager: Whether layers of several kinds may have groups of their own.
        max_encoder_tokens: The longest input of an encoder whose states the decoder's layers keep.
        pipeline_parallel_size: Over how many stages the layers are spread: each has a step of its own under way.
        v2_model_runner: Whether the second model runner is used, which schedules ahead with several stages too. On CUDA
            it is the default of models without experts and states from 0.26 on (0.26.0, vllm/config/vllm.py:605), of
            all from 0.29 on (0.32.0, vllm/config/vllm.py:703).
        extra_retained_tokens: Tokens kept before a sliding window for drafters of several modules (0.28).
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool = False
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    num_gpu_blocks_override: int | None = None
    prefix_caching: bool = True
    mamba_cache_mode: str = "none"
    hybrid_manager: bool = True
    max_encoder_tokens: int = 0
    pipeline_parallel_size: int = 1
    v2_model_runner: bool = False
    extra_retained_tokens: int = 0

    @property
    def max_in_flight_tokens(self) -> int:
        """The tokens of all steps that may be under way at once (0.26.0, vllm/config/vllm.py:512)."""
        ahead = self.async_scheduling and (self.v2_model_runner or self.pipeline_parallel_size == 1)
        return (self.pipeline_parallel_size + ahead) * self.max_num_batched_tokens
