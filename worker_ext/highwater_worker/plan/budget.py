"""The parts that a start takes of a card before the KV cache, as this version counts them.

Weights are counted as PyTorch's caching allocator does, which splits no block where 1 MiB or less would remain:
Qwen2.5-7B has 14.19 GiB of tensors, and 14.25 GiB are counted and printed.
"""

from __future__ import annotations

import importlib
from typing import Any

from highwater_worker.plan import NOT_COUNTED, estimates, say, versions
from highwater_worker.plan.estimates import Figure, exact

_MIB = 1 << 20
ROUND_BYTES = 512  # to which PyTorch's allocator rounds up
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class CachingAllocator:
    """Counts what is allocated and never given back, in bytes."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._free: dict[bool, list[int]] = {True: [], False: []}

    def allocate(self, size: int) -> None:
        size = max(ROUND_BYTES, -(-size // ROUND_BYTES) * ROUND_BYTES)
        is_small = size <= _MIB
        free = self._free[is_small]
        block = min((one for one in free if one >= size), default=0)
        if block:
            free.remove(block)
        elif is_small:
            block = 2 * _MIB
        else:
            block = 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        if block - size >= (ROUND_BYTES if is_small else _MIB + 1):
            free.append(block - size)
            block = size
        self.allocated_bytes += block


def weights_of(models: list[Any]) -> tuple[int, int]:
    """Return the bytes of all tensors on the device, each storage once; and as the allocator counts them."""
    allocator, kind = CachingAllocator(), importlib.import_module("torch").Tensor
    held: list[Any] = []
    for module in (module for model in models for module in model.modules()):
        parameters = (one for one in module._parameters.values() if one is not None)
        held += (one for one in parameters if not getattr(one, "_vllm_is_uva_offloaded", False))
        for one in (*module._buffers.values(), *vars(module).values()):
            held += one if isinstance(one, (tuple, list)) else (one,)  # adapters keep tuples of tensors
    storages = (one.untyped_storage() for one in held if isinstance(one, kind) and one.is_meta)
    sizes = {storage._cdata: storage.nbytes() for storage in storages if storage.nbytes()}
    for size in sizes.values():
        allocator.allocate(size)
    return sum(sizes.values()), allocator.allocated_bytes


def activation(peak: int, config: Any) -> Figure:
    """Return the bounds of a peak that `profile_run` had on `meta`; starts of dense models printed 36 MiB more.

    Compiled code holds less at once than operators one by one, or more where it unrolls. The fused experts keep two
    buffers in which each token is once for each of its experts; MXFP4's kernels were seen without them.
    """
    text, buffers = vars(config.model_config.hf_text_config), 0
    if _has_experts(text):
        say(NOT_COUNTED, "the workspace of fused experts was computed, not seen, in the activation peak")
        chosen = text.get("num_experts_per_tok") or text.get("moe_topk") or text.get("top_k_experts") or 1
        inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
        inner, width = inner // config.parallel_config.tensor_parallel_size, text.get("hidden_size") or 0
        rows = config.scheduler_config.max_num_batched_tokens * int(chosen) * 2
        buffers = rows * (max(2 * inner, width) + max(inner, width))
    likely = peak + 36 * _MIB + (0 if "mxfp4" in str(config.model_config.quantization) else buffers)
    why = "vLLM's profiling run on meta, operator by operator"
    return Figure(likely, peak - peak // 8, peak + peak // 8 + 128 * _MIB + buffers, "estimated", why)


def graphs(config: Any) -> Figure | None:
    """Estimate the graphs of a configuration as the command line made it; None: this version takes them off nothing."""
    if not versions.takes_off_graphs():
        return None
    is_eager = config.model_config.enforce_eager or config.compilation_config.cudagraph_mode.name == "NONE"
    text = vars(config.model_config.hf_text_config)
    return estimates.graphs(
        layers=text.get("num_hidden_layers") or 32,
        has_experts=_has_experts(text),
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        largest_batch=0 if is_eager else max(config.compilation_config.cudagraph_capture_sizes or [512]),
    )


def parts_of_start(seen: dict[str, Any], config: Any, measured: dict[str, Any], *, is_npu: bool) -> dict[str, Figure]:
    """Return every part that this version takes off, by name; `measured` replaces them, in bytes."""
    parallel = config.parallel_config
    is_alone = parallel.world_size * (parallel.data_parallel_size or 1) == 1
    parts = {name: seen[name] for name in ("weights", "activation", "graphs") if seen[name] is not None}
    parts["non_torch"] = estimates.outside_torch(is_alone=is_alone, is_npu=is_npu)
    if versions.counts_buffers():
        parts["buffers"] = exact(seen["buffers"], "the runner's tensors beside the weights")
    return parts | {name: estimates.measured(int(value), "a start measured it") for name, value in measured.items()}


def _has_experts(text: dict[str, Any]) -> bool:
    return any(text.get(name) for name in _EXPERTS)
