"""The engine's memory budget as one worker reports it: frozen values of the wire (worker_ext/README.md, ``budget``).

They come from a file or a worker call, so they are validated where they enter; a figure that this version of vLLM
lacks is ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import Field

MAX_NUMBER = 2**63 - 1
_MAX_LIST = 600

Bytes: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None
Text: TypeAlias = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] | None
Described: TypeAlias = Annotated[Mapping[str, Any], Field(max_length=40)]
"""One layer as vLLM describes it, field by field; ``plan.kv_view`` makes a layer of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMemory:
    """The memory that the start measured.

    Attributes:
        total_bytes: ``init_snapshot.total_memory``.
        init_free_bytes: ``init_snapshot.free_memory``: free before the engine took any.
        init_non_torch_bytes: ``init_snapshot.non_torch_memory``.
        utilization: ``gpu_memory_utilization``.
        requested_bytes: ``requested_memory``; on CPU ``requested_cpu_memory``.
        weights_bytes: ``model_memory_usage`` of the runner.
        peak_activation_bytes: ``peak_activation_memory``: what the profiling pass took at most and gave back; from 0.27
            on with the graphs' estimate where that is counted.
        non_torch_bytes: ``non_torch_memory``: by how much what is not PyTorch's grew; up to 0.25.
        total_consumed_bytes: ``total_consumed``: by how much the device's use grew; from 0.27 on.
        graphs_estimate_bytes: ``cudagraph_memory_estimate``.
        graphs_estimate_counted: ``VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`` as vLLM understands it.
        graphs_bytes: What capturing the graphs took.
        available_bytes: ``available_kv_cache_memory_bytes``.
        returned_bytes: What the profile returned to the engine, for the KV cache.
    """

    total_bytes: Bytes = None
    init_free_bytes: Bytes = None
    init_non_torch_bytes: int | None = None
    utilization: Annotated[float, Field(ge=0, le=100)] | None = None
    requested_bytes: Bytes = None
    weights_bytes: Bytes = None
    # vLLM's own differences: nothing holds them above zero.
    peak_activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    total_consumed_bytes: int | None = None
    graphs_estimate_bytes: int | None = None
    graphs_estimate_counted: bool | None = None
    graphs_bytes: int | None = None
    available_bytes: int | None = None
    returned_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRuns:
    """The layers of one worker, equal ones once.

    Attributes:
        kinds: Each different layer.
        runs: Which kind, and how many of it follow one another.
        are_grouped: They are as the engine grouped them: block and page sizes may be of their group.
    """

    kinds: Annotated[tuple[Described, ...], Field(max_length=64)]
    runs: Annotated[tuple[tuple[int, int], ...], Field(max_length=_MAX_LIST)]
    are_grouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheMade:
    """The KV cache that the engine made, and the settings that it was made by.

    Attributes:
        block_size: ``cache_config.block_size``.
        blocks: ``kv_cache_config.num_blocks``.
        tensor_bytes: What its allocations sum up to.
        size_tokens: ``kv_cache_size_tokens``: the log's "KV cache size"; from 0.25 on, where the worker sees it.
        max_concurrency: ``kv_cache_max_concurrency``, likewise.
        given_bytes: ``kv_cache_memory_bytes``: the pool's size was given, or a startup plan has it.
        cpu_space_bytes: ``cpu_kvcache_space_bytes``, of old CPU engines.
        blocks_override: ``num_gpu_blocks_override``.
        groups: Layers that share block tables, each with ``layers``, their number.
        layers: The layers before they were grouped, where that was seen.
    """

    block_size: Count = None
    blocks: Count = None
    tensor_bytes: Bytes = None
    size_tokens: Count = None
    max_concurrency: Annotated[float, Field(ge=0, le=1e15)] | None = None
    given_bytes: Bytes = None
    cpu_space_bytes: Bytes = None
    blocks_override: Count = None
    cache_dtype: Text = None
    mamba_cache_mode: Text = None
    prefix_caching: bool | None = None
    groups: Annotated[tuple[Described, ...], Field(max_length=128)] | None = None
    layers: LayerRuns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The settings that sizing reads, with vLLM's defaults filled in.

    Attributes:
        max_encoder_tokens: ``max_num_encoder_input_tokens``.
        v2_runner: ``use_v2_model_runner``.
    """

    max_model_len: Count = None
    max_num_batched_tokens: Count = None
    max_num_seqs: Count = None
    max_encoder_tokens: Count = None
    v2_runner: bool | None = None
    async_scheduling: bool | None = None
    hybrid_manager: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """The multimodal budget.

    Attributes:
        compute_budget: Embeddings that the encoder makes in one step at most.
        cache_size: Embeddings that the encoder cache keeps.
        max_tokens_per_item: By modality, the largest item.
        max_items_per_prompt: By modality.
        max_items_per_batch: By modality: so many are profiled.
        embed_width: The width of one embedding, as far as the model shows it.
        embed_bytes: The size of one element of it.
        skips_profiling: ``skip_mm_profiling``.
    """

    compute_budget: Count = None
    cache_size: Count = None
    max_tokens_per_item: Annotated[Mapping[str, Count], Field(max_length=16)] | None = None
    max_items_per_prompt: Annotated[Mapping[str, Count], Field(max_length=16)] | None = None
    max_items_per_batch: Annotated[Mapping[str, Count], Field(max_length=16)] | None = None
    embed_width: Count = None
    embed_bytes: Count = None
    skips_profiling: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """One worker's word on its start; see the parts.

    Attributes:
        ascend_version: Of vllm-ascend, where that is loaded.
        environment: The variables of the worker's process that change how much memory is used.
    """

    vllm_version: Text = None
    ascend_version: Text = None
    architecture: Text = None
    dtype: Text = None
    memory: StartMemory = field(default_factory=StartMemory)
    kv_cache: KvCacheMade = field(default_factory=KvCacheMade)
    limits: EngineLimits | None = None
    encoder: EncoderLimits | None = None
    parallel: Annotated[Mapping[str, Count], Field(max_length=16)] = field(default_factory=dict)
    environment: Annotated[Mapping[str, Text], Field(max_length=40)] = field(default_factory=dict)
