"""Workers as known starts left them: the attributes that vLLM of that version has, with the figures of its log.

The wire between sidecar and worker is made of them by the worker package itself (`wire`), so that what a test sees of a
budget went through both sides of the contract.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from highwater_worker.memory.engine_budget import read_engine_budget
from highwater_worker.memory.storages import describe_layers

GIB = 1024**3


class Dtype:
    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __str__(self) -> str:
        return f"torch.{self.name}"


BF16 = Dtype("bfloat16", 2)


class FullAttentionSpec(SimpleNamespace):
    """vLLM's own, as far as a worker's attributes show it."""

    @property
    def page_size_bytes(self) -> int:
        return int(2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize)


class SlidingWindowSpec(FullAttentionSpec):
    """The same with a window."""


class MambaSpec(SimpleNamespace):
    """A state."""

    @property
    def page_size_bytes(self) -> int:
        return int(self.page_size_padded)


def full(kv_heads: int, head: int, block: int, dtype: Dtype = BF16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=kv_heads, head_size=head, dtype=dtype, sliding_window=None)


def sliding(kv_heads: int, head: int, block: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=kv_heads, head_size=head, dtype=BF16, sliding_window=window)


def group(spec: object, layers: int) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{n}" for n in range(layers)])


def started(
    *,
    specs: list[object],
    groups: list[SimpleNamespace],
    blocks: int,
    block_bytes: int,
    limits: Mapping[str, Any],
    memory: Mapping[str, Any],
    cache: Mapping[str, Any] = {},
    runner: Mapping[str, Any] = {},
    parallel: Mapping[str, int] = {},
    architecture: str = "Qwen3VLForConditionalGeneration",
) -> SimpleNamespace:
    made = SimpleNamespace(
        num_blocks=blocks, kv_cache_groups=groups, kv_cache_tensors=[SimpleNamespace(size=blocks * block_bytes)]
    )
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1} | dict(parallel)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            **{
                "block_size": groups[0].kv_cache_spec.block_size,
                "cache_dtype": "auto",
                "gpu_memory_utilization": 0.95,
                "enable_prefix_caching": True,
                "kv_cache_memory_bytes": None,
                "num_gpu_blocks_override": None,
            }
            | dict(cache)
        ),
        model_config=SimpleNamespace(
            dtype=BF16,
            max_model_len=limits["max_model_len"],
            hf_config=SimpleNamespace(architectures=[architecture]),
            hf_image_processor_config={
                "patch_size": 16,
                "merge_size": 2,
                "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
            },
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_num_seqs=limits["max_num_seqs"],
            async_scheduling=limits.get("async_scheduling", False),
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=SimpleNamespace(**sizes),
    )
    return SimpleNamespace(
        vllm_config=config,
        model_runner=SimpleNamespace(kv_cache_config=made, **runner),
        specs={f"layers.{n}": spec for n, spec in enumerate(specs)},
        **memory,
    )


def wire(worker: SimpleNamespace, *, version: str, returned: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return what the worker's package says of it, as JSON that went over the wire."""
    start = SimpleNamespace(
        returned={} if returned is None else {"profile": returned}, kv_layers=describe_layers(worker.specs)
    )
    read = read_engine_budget(worker, start) | {"vllm_version": version, "environment": {}} | changes  # type: ignore[arg-type]
    return json.loads(json.dumps(read))  # type: ignore[no-any-return]


def story() -> SimpleNamespace:
    """Qwen3-VL-8B on vLLM 0.12.0, two NPUs of 60.96 GiB: one rank, figures as its log printed them."""
    total, requested = int(60.96 * GIB), int(60.96 * GIB * 0.95)
    weights, peak, non_torch = int(9.1948 * GIB), int(3.86 * GIB), int(0.56 * GIB)
    budget = SimpleNamespace(
        encoder_compute_budget=32_768,
        encoder_cache_size=32_768,
        max_tokens_by_modality={"image": 16_384},
        max_items_per_prompt_by_modality={"image": 4},
        max_items_per_batch_by_modality={"image": 2},
    )
    return started(
        specs=[full(4, 128, 128)] * 36,
        groups=[group(full(4, 128, 128), 36)],
        blocks=5_040,
        block_bytes=9 * 1024**2,
        limits={"max_model_len": 65_536, "max_num_batched_tokens": 32_768, "max_num_seqs": 8},
        memory={
            "init_snapshot": SimpleNamespace(
                total_memory=total, free_memory=int(60.61 * GIB), non_torch_memory=total - int(60.61 * GIB)
            ),
            "requested_memory": requested,
            "peak_activation_memory": peak,
            "non_torch_memory": non_torch,
            "available_kv_cache_memory_bytes": requested - weights - peak - non_torch,
        },
        runner={"model_memory_usage": weights, "mm_budget": budget, "inputs_embeds_size": 4_096},
        parallel={"tensor_parallel_size": 2},
    )


def larger_story() -> SimpleNamespace:
    """Qwen3-VL-32B there: its worker keeps nothing of its profile, and logs what is available and the total."""
    return started(
        specs=[full(4, 128, 128)] * 64,
        groups=[group(full(4, 128, 128), 64)],
        blocks=1_283,
        block_bytes=16 * 1024**2,
        limits={"max_model_len": 65_536, "max_num_batched_tokens": 16_384, "max_num_seqs": 16},
        memory={"init_npu_memory": 65_452_113_920 - 367_001_600},
        cache={"gpu_memory_utilization": 0.9},
        runner={"model_memory_usage": int(31.4592 * GIB)},
        parallel={"tensor_parallel_size": 2},
    )


def gemma() -> SimpleNamespace:
    """gemma-3-27b-it on one H100, vLLM 0.19.0, utilization 0.95: weights 51.45, activation 3.99, non-torch 0.26."""
    total = int(79.19 * GIB)
    parts = {"weights": 51.45, "peak": 3.99, "non_torch": 0.26}
    weights, peak, non_torch = (int(size * GIB) for size in parts.values())
    available = 20_968_000_000
    local, wide = sliding(16, 128, 16, 1_024), full(16, 128, 16)
    return started(
        specs=[wide if (n + 1) % 6 == 0 else local for n in range(62)],
        groups=[group(wide, 10), *[group(local, 10)] * 5, group(local, 2)],
        blocks=15_997,
        block_bytes=10 * 2 * 16 * 16 * 128 * 2,
        limits={"max_model_len": 8_192, "max_num_batched_tokens": 8_192, "max_num_seqs": 256, "async_scheduling": True},
        memory={
            "init_snapshot": SimpleNamespace(
                total_memory=total, free_memory=total - int(0.5 * GIB), non_torch_memory=int(0.5 * GIB)
            ),
            "requested_memory": weights + peak + non_torch + available,
            "peak_activation_memory": peak,
            "non_torch_memory": non_torch,
            "cudagraph_memory_estimate": int(1.05 * GIB),
            "available_kv_cache_memory_bytes": available,
        },
        runner={"model_memory_usage": weights},
        architecture="Gemma3ForConditionalGeneration",
    )


def qwen3_next() -> SimpleNamespace:
    """Qwen3-Next-80B on H200, TP 2, vLLM 0.10.2: 12 layers of attention, 36 of gated delta nets in groups of 12."""
    weights, peak, non_torch = (int(size * GIB) for size in (74.28, 5.58, 1.38))
    available = 47_878_721_024
    attention = full(1, 256, 544)
    state = MambaSpec(
        block_size=262_144,
        shapes=((3, 4_096), (16, 128, 128)),
        dtypes=(BF16, BF16),
        page_size_padded=attention.page_size_bytes,
        num_speculative_blocks=0,
    )
    return started(
        specs=[attention if (n + 1) % 4 == 0 else state for n in range(48)],
        groups=[group(attention, 12), *[group(state, 12)] * 3],
        blocks=7_162,
        block_bytes=12 * attention.page_size_bytes,
        limits={"max_model_len": 262_144, "max_num_batched_tokens": 8_192, "max_num_seqs": 256},
        memory={
            "init_snapshot": SimpleNamespace(
                total_memory=int(139.81 * GIB), free_memory=int(139.3 * GIB), non_torch_memory=int(0.51 * GIB)
            ),
            "requested_memory": weights + peak + non_torch + available,
            "peak_activation_memory": peak,
            "non_torch_memory": non_torch,
            "available_kv_cache_memory_bytes": available,
        },
        cache={"block_size": 544},
        runner={"model_memory_usage": weights},
        parallel={"tensor_parallel_size": 2},
        architecture="Qwen3NextForCausalLM",
    )
