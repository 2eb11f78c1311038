"""The part of an engine's configuration that the size of its KV cache depends on."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.flags import EngineFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The values of `VllmConfig` that vLLM's KV cache sizing reads, with vLLM's defaults filled in."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool = False  # the next step is scheduled while one runs: twice as many tokens are under way
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    num_gpu_blocks_override: int | None = None  # the number of blocks to make; None: what fits
    prefix_caching: bool = True
    mamba_cache_mode: str = "none"  # which states are kept: ``none``, ``align`` or ``all``
    hybrid_manager: bool = True  # layers of several kinds may have groups of their own
    max_encoder_tokens: int = 0  # the longest input of an encoder whose states the decoder's layers keep
    pipeline_parallel_size: int = 1  # the stages, each of which has a step of its own under way
    # The second model runner, which schedules ahead with several stages too. On CUDA it is the default of models
    # without experts and states from 0.26 on (0.26.0, vllm/config/vllm.py:605), of all from 0.29 on (0.32.0,
    # vllm/config/vllm.py:703).
    v2_model_runner: bool = False
    extra_retained_tokens: int = 0  # tokens kept before a sliding window for drafters of several modules (0.28)

    @classmethod
    def of(cls, flags: EngineFlags, *, max_encoder_tokens: int, v2_model_runner: bool) -> Limits:
        return cls(
            max_model_len=flags.max_model_len or 0,
            max_num_batched_tokens=flags.max_num_batched_tokens or 0,
            max_num_seqs=flags.max_num_seqs or 0,
            async_scheduling=bool(flags.async_scheduling),
            decode_context_parallel_size=flags.decode_context_parallel_size,
            prefill_context_parallel_size=flags.prefill_context_parallel_size,
            num_gpu_blocks_override=flags.num_gpu_blocks_override,
            prefix_caching=flags.enable_prefix_caching is not False,
            mamba_cache_mode=flags.mamba_cache_mode or "none",
            hybrid_manager=not flags.disable_hybrid_kv_cache_manager,
            max_encoder_tokens=max_encoder_tokens,
            pipeline_parallel_size=flags.pipeline_parallel_size,
            v2_model_runner=v2_model_runner,
        )

    @property
    def max_in_flight_tokens(self) -> int:
        """The tokens of all steps that may be under way at once (0.26.0, vllm/config/vllm.py:512)."""
        ahead = self.async_scheduling and (self.v2_model_runner or self.pipeline_parallel_size == 1)
        return (self.pipeline_parallel_size + ahead) * self.max_num_batched_tokens
