"""The engine's memory budget as one worker reports it (worker_ext/README.md, ``budget``).

It comes from a file or a worker call, so it is validated where it enters; a figure that this version of vLLM lacks is
``None``. The vLLM attribute behind each figure: worker_ext/highwater_worker/memory/engine_budget.py.

torch_npu reads PYTORCH_NPU_ALLOC_CONF, and PYTORCH_ALLOC_CONF too from 2.13 on, where both are an error; of an option
that is set twice the last one counts (Ascend/pytorch csrc/core/npu/NPUCachingAllocator.cpp, `parseArgs`). vllm-ascend
from 0.14 on appends `expandable_segments:True` before it starts its workers, unless sleep mode is on or an option that
excludes it is set, and takes it out where sleep mode is on (vllm-ascend pull request 5855; 0.30.0rc2 platform.py:1436).
So the variables of the worker's own process show the outcome, whatever the version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

from highwater.model.rank import MAX_NUMBER

_MAX_LIST = 600
_ON: Final = frozenset({"true", "1"})
_READS_EVERY_ALLOCATORS_VARIABLE: Final = (2, 13)
# An NPU's allocator takes none of these together with expandable segments.
EXCLUDED: Final = ("max_split_size_mb", "garbage_collection_threshold")

Bytes: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None
Text: TypeAlias = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] | None
Described: TypeAlias = Annotated[Mapping[str, Any], Field(max_length=40)]
"""One layer as vLLM describes it, field by field; ``explain.explanation`` makes a layer of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMemory:
    total_bytes: Bytes = None
    init_free_bytes: Bytes = None
    init_non_torch_bytes: int | None = None
    utilization: Annotated[float, Field(ge=0, le=100)] | None = None  # `gpu_memory_utilization`
    requested_bytes: Bytes = None
    weights_bytes: Bytes = None
    # The figures without a type of their own are vLLM's differences, and may be negative. This is what the profiling
    # pass took at most and gave back; from 0.27 on with the graphs' estimate where that is counted.
    peak_activation_bytes: int | None = None
    non_torch_bytes: int | None = None  # the growth of what is not PyTorch's; up to 0.25
    total_consumed_bytes: int | None = None  # the growth of the device's use; from 0.27 on
    graphs_estimate_bytes: int | None = None
    graphs_estimate_counted: bool | None = None  # `VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS` as vLLM understands it
    graphs_bytes: int | None = None
    available_bytes: int | None = None
    returned_bytes: int | None = None  # what the profile returned to the engine, for the KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRuns:
    kinds: Annotated[tuple[Described, ...], Field(max_length=64)]  # each different layer
    # The index of a kind, and how many of it follow one another.
    runs: Annotated[tuple[tuple[int, int], ...], Field(max_length=_MAX_LIST)]
    are_grouped: bool = False  # they are as the engine grouped them: block and page sizes may be of their group


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheMade:
    block_size: Count = None
    blocks: Count = None
    tensor_bytes: Bytes = None  # the sum of its allocations
    size_tokens: Count = None  # the log's "KV cache size"; from 0.25 on, as `max_concurrency`
    max_concurrency: Annotated[float, Field(ge=0, le=1e15)] | None = None
    given_bytes: Bytes = None  # `kv_cache_memory_bytes`: the pool's size was given, or a startup plan has it
    cpu_space_bytes: Bytes = None  # of old CPU engines
    blocks_override: Count = None
    cache_dtype: Text = None
    mamba_cache_mode: Text = None
    prefix_caching: bool | None = None
    # Layers that share block tables, each with `layers`, their number.
    groups: Annotated[tuple[Described, ...], Field(max_length=128)] | None = None
    layers: LayerRuns | None = None  # the layers before they were grouped, where that was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The settings that sizing reads, with vLLM's defaults filled in."""

    max_model_len: Count = None
    max_num_batched_tokens: Count = None
    max_num_seqs: Count = None
    max_encoder_tokens: Count = None
    v2_runner: bool | None = None
    async_scheduling: bool | None = None
    hybrid_manager: bool | None = None
    sleep_mode: bool | None = None  # `--enable-sleep-mode`


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRule:
    """How an image becomes tokens: one for each square of patch times merge pixels, scaled into bounds."""

    patch_size: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    merge_size: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    min_pixels: Count = None
    max_pixels: Count = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    compute_budget: Count = None  # embeddings that the encoder computes in one step at most
    cache_size: Count = None  # embeddings that the encoder cache keeps
    # The largest item, by modality, as the next two.
    max_tokens_per_item: Annotated[Mapping[str, Count], Field(max_length=16)] | None = None
    max_items_per_prompt: Annotated[Mapping[str, Count], Field(max_length=16)] | None = None
    max_items_per_batch: Annotated[Mapping[str, Count], Field(max_length=16)] | None = None  # so many are profiled
    embed_width: Count = None  # elements of one embedding, of `embed_bytes` each
    embed_bytes: Count = None
    skips_profiling: bool | None = None
    image_rule: ImageRule | None = None

    @property
    def cache_bytes(self) -> int | None:
        """The encoder cache by the width of the model's embeddings; None: not known."""
        if self.cache_size is None or self.embed_width is None or self.embed_bytes is None:
            return None
        return self.cache_size * self.embed_width * self.embed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    vllm_version: Text = None
    ascend_version: Text = None
    torch_npu_version: Text = None
    architecture: Text = None
    dtype: Text = None
    memory: StartMemory = field(default_factory=StartMemory)
    kv_cache: KvCacheMade = field(default_factory=KvCacheMade)
    limits: EngineLimits | None = None
    encoder: EncoderLimits | None = None
    parallel: Annotated[Mapping[str, Count], Field(max_length=16)] = field(default_factory=dict)
    # The variables of the worker's process that change how much memory is used.
    environment: Annotated[Mapping[str, Text], Field(max_length=40)] = field(default_factory=dict)

    @property
    def expandable_segments(self) -> bool | None:
        """True if an NPU worker's allocator has expandable segments; ``None`` where its variables do not say.

        A driver that cannot reserve addresses switches them off again, with a warning in the log alone.
        """
        own, shared = (self.environment.get(name) for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        if allocator_options(own) or not sets_expandable_segments(shared):
            return sets_expandable_segments(own)
        release = re.match(r"(\d+)\.(\d+)", self.torch_npu_version or "")
        return None if release is None else tuple(map(int, release.groups())) >= _READS_EVERY_ALLOCATORS_VARIABLE


def allocator_options(text: str | None) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for part in (text or "").split(","):
        key, _, value = part.partition(":")
        if key.strip():
            options.setdefault(key.strip(), []).append(value.strip())
    return options


def sets_expandable_segments(text: str | None) -> bool:
    return allocator_options(text).get("expandable_segments", [""])[-1].lower() in _ON
