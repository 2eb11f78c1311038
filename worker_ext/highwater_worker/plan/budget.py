"""The parts that a start takes of a card before the KV cache, as this version counts them, and the pool of the rest.

Weights are counted as PyTorch's caching allocator does, which splits no block where 1 MiB or less would remain:
Qwen2.5-7B has 14.19 GiB of tensors, and 14.25 GiB are counted and printed.
"""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

from highwater_worker.plan import LOG, NOT_COUNTED, cards, say, versions
from highwater_worker.plan.cards import Figure, exact

_MIB = 1 << 20
ROUND_BYTES = 512  # to which PyTorch's allocator rounds up
_CONFIGS = ("model_config", "cache_config", "scheduler_config", "parallel_config")
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
    return cards.graphs(
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
    parts["non_torch"] = cards.outside_torch(is_alone=is_alone, is_npu=is_npu)
    if versions.counts_buffers():
        parts["buffers"] = exact(seen["buffers"], "the runner's tensors beside the weights")
    return parts | {name: cards.measured(int(value), "a start measured it") for name, value in measured.items()}


def _has_experts(text: dict[str, Any]) -> bool:
    return any(text.get(name) for name in _EXPERTS)


# --- the KV cache ---


def kv_pool(config: Any, specs: list[Any], available: list[int]) -> dict[str, Any]:
    """Return the pool's figures; one that vLLM refuses has `refusal`, and what was compared.

    Args:
        config: Stays as it is.
        specs: Each rank's layers.
        available: Each rank's bytes.
    """
    config = copy.copy(config)
    for name in _CONFIGS:
        setattr(config, name, copy.copy(getattr(config, name)))
    utils, planning = versions.planning()
    log = utils.logger = planning.logger = _Log()
    pools: list[Any] = []
    backends = importlib.import_module("vllm.v1.attention.backends.utils")
    workers = SimpleNamespace(  # what the engine core calls of them, in any version
        get_kv_cache_specs=lambda: specs,
        determine_available_memory=lambda: available,
        get_supported_kv_cache_layouts=lambda: [versions.supported_layouts(config)] * len(specs),
        set_kv_cache_layout=lambda layout, *_: backends.record_kv_cache_layout(config.cache_config, layout),
        initialize_from_config=pools.extend,
        get_simple_cpu_offload_num_blocks=lambda: 0,
        compile_or_warm_up_model=lambda: None,
    )
    core = SimpleNamespace(model_executor=workers, collective_rpc=lambda *_, **__: None)
    refusal = None
    with versions.recorded_checks(planning) as checks:
        try:
            with importlib.import_module("vllm.config").set_current_vllm_config(config):
                importlib.import_module("vllm.v1.engine.core").EngineCore._initialize_kv_caches(core, config)
        except ValueError as error:
            refusal = str(error)
    figures: dict[str, Any] = {"fits": refusal is None, "refusal": refusal, "available_bytes": min(available)}
    if checks:
        figures["needed_bytes"] = max((needed - have, needed) for have, needed, _ in checks)[1]
        figures["max_model_len_that_fits"] = min(longest for _, _, longest in checks)
    if refusal is not None or not pools:
        return figures
    first, sizes = pools[0], [versions.bytes_per_block(config, one) for one in pools]
    groups = [(type(group.kv_cache_spec).__name__, group) for group in first.kv_cache_groups]
    tokens = [
        # The value that stands before the word.
        int(values[text.partition("%s tokens")[0].count("%s")].replace(",", ""))
        for text, values in log.lines
        if "KV cache size" in text
    ]
    return figures | {
        "blocks": first.num_blocks,
        "bytes_per_block": min(zip(available, sizes), key=lambda rank: rank[0] // max(rank[1], 1))[1],
        "block_size": min((group.kv_cache_spec.block_size for _, group in groups), default=None),
        "tokens": min(tokens, default=None),
        "max_concurrency": min((args[-1] for text, args in log.lines if "Maximum concurrency" in text), default=None),
        "max_model_len": config.model_config.max_model_len,
        "groups": [
            {
                "kind": kind,
                "layers": len(group.layer_names),
                "block_size": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
            }
            for kind, group in groups
        ],
    }


class _Log:
    """Replaces the logger of a vLLM module, and keeps each line with its values."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def log(text: object, *values: Any, **_options: Any) -> None:
            self.lines.append((str(text), values))
            if name.startswith(("warning", "error")):
                say(LOG, str(text) % values if values else str(text))

        return log
