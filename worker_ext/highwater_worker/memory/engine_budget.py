"""The engine's memory budget as it stands in the worker's attributes once the engine has started.

Everything is read with `getattr`, by the names that versions from 0.11 on have used; what this version lacks is null.
The sidecar adds nothing up that stands here already, and explains the rest (docs/explain.md).

Where each figure is from: what the profile measured (vllm 0.12.0 v1/worker/gpu_worker.py:326, vllm 0.23.0
v1/worker/gpu_worker.py:445, `non_torch_memory`; vllm 0.27.0 v1/worker/gpu_worker.py:526, vllm 0.32.0
v1/worker/gpu_worker.py:734, `total_consumed`), what it left (vllm 0.12.0 v1/worker/gpu_worker.py:341, vllm 0.32.0
v1/worker/gpu_worker.py:740, `available_kv_cache_memory_bytes`).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from highwater_worker.attributes import fraction, look_up, text, whole
from highwater_worker.errors import printable
from highwater_worker.identity import parallel_size
from highwater_worker.memory.kv_layers import describe_groups, describe_layers
from highwater_worker.memory.memory_parts import init_free_bytes
from highwater_worker.notes import Notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from highwater_worker.memory.start_phases import StartPhases

ENVIRONMENT = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
    "ASCEND_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "HCCL_BUFFSIZE",
    "NCCL_BUFFSIZE",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ENABLE_STARTUP_PLAN",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
)
"""The only variables that are read: each changes how much memory is used, and none holds a secret."""
_MAX_TEXT = 200
_MAX_MODALITIES = 8

_MEMORY: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "total_bytes": (("init_snapshot", "total_memory"),),
    "init_non_torch_bytes": (("init_snapshot", "non_torch_memory"),),
    "requested_bytes": (("requested_memory",), ("requested_cpu_memory",)),
    "weights_bytes": (("model_runner", "model_memory_usage"),),
    "peak_activation_bytes": (("peak_activation_memory",),),
    "non_torch_bytes": (("non_torch_memory",),),
    "total_consumed_bytes": (("total_consumed",),),
    "graphs_estimate_bytes": (("cudagraph_memory_estimate",),),
    "available_bytes": (("available_kv_cache_memory_bytes",),),
}
_CACHE: Mapping[str, str] = {
    "block_size": "block_size",
    "size_tokens": "kv_cache_size_tokens",
    "given_bytes": "kv_cache_memory_bytes",
    "cpu_space_bytes": "cpu_kvcache_space_bytes",
    "blocks_override": "num_gpu_blocks_override",
}
_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


def read_engine_budget(worker: object, start: StartPhases | None) -> dict[str, Any]:
    """Return the budget as one JSON object; unknown values are null.

    Args:
        worker: The worker.
        start: What was seen of its start; None where the plugin did not see it.
    """
    notes = Notes()
    return {
        "vllm_version": text(look_up(sys.modules.get("vllm"), "__version__")),
        "ascend_version": text(look_up(sys.modules.get("vllm_ascend"), "__version__"))
        or text(look_up(sys.modules.get("vllm_ascend._version"), "__version__")),
        "architecture": notes.attempt("architecture", lambda: _architecture(worker)),
        "dtype": notes.attempt("dtype", lambda: _short(look_up(worker, "vllm_config", "model_config", "dtype"))),
        "memory": _memory(worker, start, notes),
        "kv_cache": _kv_cache(worker, start, notes),
        "limits": notes.attempt("limits", lambda: _limits(worker)),
        "encoder": notes.attempt("encoder", lambda: _encoder(worker)),
        "parallel": {name: notes.attempt(name, partial(parallel_size, worker, name)) for name in _PARALLEL},
        "environment": {name: printable(os.environ[name], _MAX_TEXT) for name in ENVIRONMENT if name in os.environ},
        "notes": notes.as_list(),
    }


def _memory(worker: object, start: StartPhases | None, notes: Notes) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: notes.attempt(name, partial(_first, worker, paths)) for name, paths in _MEMORY.items()
    }
    figures["init_free_bytes"] = notes.attempt("init_free_bytes", lambda: init_free_bytes(worker))
    figures["utilization"] = notes.attempt(
        "utilization", lambda: fraction(look_up(worker, "vllm_config", "cache_config", "gpu_memory_utilization"))
    )
    # The estimate is made in any case, and counted where the variable says so: its default differs by version.
    flag = look_up(sys.modules.get("vllm.envs"), "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    figures["graphs_estimate_counted"] = flag if isinstance(flag, bool) else None
    returned = {} if start is None else start.returned
    figures["returned_bytes"] = returned.get("profile")
    figures["graphs_bytes"] = returned.get("graphs")
    return figures


def _kv_cache(worker: object, start: StartPhases | None, notes: Notes) -> dict[str, Any]:
    cache = look_up(worker, "vllm_config", "cache_config")
    made = look_up(worker, "model_runner", "kv_cache_config")
    described: dict[str, Any] = {
        name: notes.attempt(name, partial(_whole_of, cache, path)) for name, path in _CACHE.items()
    }
    described["cache_dtype"] = notes.attempt("cache_dtype", lambda: _short(look_up(cache, "cache_dtype")))
    described["mamba_cache_mode"] = notes.attempt(
        "mamba_cache_mode", lambda: _short(look_up(cache, "mamba_cache_mode"))
    )
    described["prefix_caching"] = notes.attempt(
        "prefix_caching", lambda: _flag(look_up(cache, "enable_prefix_caching"))
    )
    described["max_concurrency"] = notes.attempt(
        "max_concurrency", lambda: fraction(look_up(cache, "kv_cache_max_concurrency"))
    )
    described["blocks"] = notes.attempt("blocks", lambda: whole(look_up(made, "num_blocks")))
    described["tensor_bytes"] = notes.attempt("tensor_bytes", lambda: _tensor_bytes(look_up(made, "kv_cache_tensors")))
    described["groups"] = notes.attempt("groups", lambda: _groups(made))
    described["layers"] = notes.attempt("layers", lambda: _layers(made, start))
    return described


def _groups(made: object) -> list[dict[str, Any]] | None:
    groups = look_up(made, "kv_cache_groups")
    return None if groups is None else describe_groups(groups)


def _layers(made: object, start: StartPhases | None) -> dict[str, Any] | None:
    """Return the layers as they were before they were grouped, or, where that was not seen, as they are in groups."""
    if start is not None and start.kv_layers is not None:
        return start.kv_layers
    specs: dict[str, object] = {}
    for group in look_up(made, "kv_cache_groups") or ():
        shared = look_up(group, "kv_cache_spec")
        own = look_up(shared, "kv_cache_specs")
        specs.update({name: (own or {}).get(name, shared) for name in look_up(group, "layer_names") or ()})
    return {**describe_layers(specs), "are_grouped": True} if specs else None


def _tensor_bytes(tensors: Iterable[object] | None) -> int | None:
    """Return the bytes of the pool's allocations on the device."""
    if tensors is None:
        return None
    here = [tensor for tensor in tensors if not look_up(tensor, "host_resident")]
    sizes = [whole(look_up(tensor, "size")) for tensor in here]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return None
    # Tensors with a stride lie in one allocation, of which each names the whole size (vllm 0.27.0
    # v1/core/kv_cache_utils.py:1351, vllm 0.32.0 v1/core/kv_cache_utils.py:1668).
    is_packed = any(whole(look_up(tensor, "block_stride")) for tensor in here)
    return max(known) if is_packed else sum(known)


def _limits(worker: object) -> dict[str, Any]:
    scheduler = look_up(worker, "vllm_config", "scheduler_config")
    model = look_up(worker, "vllm_config", "model_config")
    return {
        "max_model_len": whole(look_up(model, "max_model_len")),
        "max_num_batched_tokens": whole(look_up(scheduler, "max_num_batched_tokens")),
        "max_num_seqs": whole(look_up(scheduler, "max_num_seqs")),
        "max_encoder_tokens": whole(look_up(scheduler, "max_num_encoder_input_tokens")),
        "v2_runner": _flag(look_up(worker, "use_v2_model_runner")),
        "async_scheduling": _flag(look_up(scheduler, "async_scheduling")),
        "hybrid_manager": _hybrid(look_up(scheduler, "disable_hybrid_kv_cache_manager")),
    }


def _encoder(worker: object) -> dict[str, Any] | None:
    runner = look_up(worker, "model_runner")
    budget = look_up(runner, "mm_budget")
    if not budget:
        return None
    model = look_up(runner, "model")
    tower = look_up(model, "visual", "out_hidden_size") or look_up(model, "vision_tower", "out_hidden_size")
    return {
        "compute_budget": whole(look_up(budget, "encoder_compute_budget")),
        "cache_size": whole(look_up(budget, "encoder_cache_size")),
        # Renamed in 0.15; each is a mapping by modality.
        "max_tokens_per_item": _by_modality(budget, "mm_max_toks_per_item", "max_tokens_by_modality"),
        "max_items_per_prompt": _by_modality(budget, "mm_max_items_per_prompt", "max_items_per_prompt_by_modality"),
        "max_items_per_batch": _by_modality(budget, "mm_max_items_per_batch", "max_items_per_batch_by_modality"),
        "embed_width": whole(tower) or whole(look_up(runner, "inputs_embeds_size")),
        "embed_bytes": whole(look_up(worker, "vllm_config", "model_config", "dtype", "itemsize")),
        "skips_profiling": _flag(
            look_up(worker, "vllm_config", "model_config", "multimodal_config", "skip_mm_profiling")
        ),
    }


def _by_modality(budget: object, *names: str) -> dict[str, int | None] | None:
    found = next((value for name in names if isinstance(value := look_up(budget, name), dict)), None)
    return None if found is None else {str(key)[:20]: whole(found[key]) for key in list(found)[:_MAX_MODALITIES]}


def _architecture(worker: object) -> str | None:
    names = look_up(worker, "vllm_config", "model_config", "hf_config", "architectures")
    return _short(names[0]) if isinstance(names, (list, tuple)) and names else None


def _first(worker: object, paths: Iterable[tuple[str, ...]]) -> int | None:
    return next((value for path in paths if (value := whole(look_up(worker, *path))) is not None), None)


def _whole_of(value: object, name: str) -> int | None:
    return whole(look_up(value, name))


def _hybrid(disabled: object) -> bool | None:
    return None if disabled is None else not disabled


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _short(value: object) -> str | None:
    return None if value is None else printable(str(value), _MAX_TEXT)
