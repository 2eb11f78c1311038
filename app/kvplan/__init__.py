"""A KV cache by vLLM's rules: groups of layers, pool, tokens, concurrency, longest length; a package of its own.

Here are the words of all its modules: the one error, a size in bytes with how well it is known, and the flags that a
plan is for: vLLM's own, what each may be, and the part of them that sizes a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, TypeAlias

# How a figure is known, best first: the engine's own number, a formula of vLLM's, a value that was measured, an
# estimate between bounds.
Grade: TypeAlias = Literal["engine", "exact", "measured", "estimated"]
GRADES: Final[tuple[Grade, ...]] = ("engine", "exact", "measured", "estimated")
MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
_MAX_ECHO: Final = 100


class PlanError(Exception):
    """A plan cannot be made: the message names the key, the value and what would be right."""


def short(value: object) -> str:
    """Return a value as an error shows it: a long one is cut, whoever sent it."""
    text = repr(value)
    return text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}..."


class Figure(NamedTuple):
    """One part of a memory budget: its likely size in bytes, and bounds, which differ in an estimate alone."""

    bytes: int
    low: int
    high: int
    grade: Grade
    why: str  # where the figure comes from, in one sentence


def estimated(low: int, likely: int, high: int, why: str) -> Figure:
    return Figure(likely, min(low, likely), max(high, likely), "estimated", why)


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


# --- the flags ---

Platform: TypeAlias = Literal["cuda", "ascend", "cpu"]

DEFAULT_CAPABILITY: Final = "9.0"
_MAX_RANKS: Final = 1024
_MAX_NUMBER: Final = 1 << 48


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
    def capability(self) -> tuple[int, ...]:
        return tuple(map(int, (self.compute_capability or DEFAULT_CAPABILITY).split(".")))


FLAG_KINDS: Final[Mapping[str, str]] = {
    field.name: str(field.type).partition("[")[0].partition(" |")[0] for field in fields(EngineFlags)
}
"""The type of each flag's value by name: ``int``, ``float``, ``bool``, ``str``, ``Mapping``, ``Platform``."""


def checked_flag(key: str, value: Any) -> Any:  # noqa: ANN401 - a value that somebody sent
    """Return a flag's value. Raises PlanError: the flag does not take it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match FLAG_KINDS[key]:
        case "int":
            most = _MAX_RANKS if key.endswith("_parallel_size") else _MAX_NUMBER
            if not is_number or isinstance(value, float) or not 1 <= value <= most:
                raise PlanError(f"{key}: {short(value)} must be a whole number of 1 to {most}")
        case "float" if not is_number or not 0 < value <= 1:
            raise PlanError(f"{key}: {short(value)} must be a share over 0 and up to 1")
        case "str" if not isinstance(value, str):
            raise PlanError(f"{key}: {short(value)} must be a word, such as auto or fp8")
    return value


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
    mamba_cache_mode: str = "none"  # which states are kept: ``none``, ``align`` or ``all``
    hybrid_manager: bool = True  # layers of several kinds may have groups of their own
    max_encoder_tokens: int = 0  # the longest input of an encoder whose states the decoder's layers keep
    pipeline_parallel_size: int = 1  # the stages, each of which has a step of its own under way
    # The second model runner, which schedules ahead with several stages too. On CUDA it is the default of models
    # without experts and states from 0.26 on (0.26.0, vllm/config/vllm.py:605), of all from 0.29 on (0.32.0,
    # vllm/config/vllm.py:703).
    v2_model_runner: bool = False

    @classmethod
    def of(cls, flags: EngineFlags, *, max_encoder_tokens: int, v2_model_runner: bool) -> Limits:
        """Return those of flags that have a length, tokens and requests."""
        same = {field.name: getattr(flags, field.name) for field in fields(cls) if field.name in FLAG_KINDS}
        return cls(
            **{name: value for name, value in same.items() if value is not None},
            hybrid_manager=not flags.disable_hybrid_kv_cache_manager,
            max_encoder_tokens=max_encoder_tokens,
            v2_model_runner=v2_model_runner,
        )

    @property
    def max_in_flight_tokens(self) -> int:
        """The tokens of all steps that may be under way at once (0.26.0, vllm/config/vllm.py:512)."""
        ahead = self.async_scheduling and (self.v2_model_runner or self.pipeline_parallel_size == 1)
        return (self.pipeline_parallel_size + ahead) * self.max_num_batched_tokens
