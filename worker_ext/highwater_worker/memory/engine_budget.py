"""The engine's memory budget as it stands in the worker's attributes once the engine has started.

Everything is read with `getattr`, by the names that versions from 0.11 on have used; what this version lacks is null.
docs/explain.md says what each figure means.

The sources of the figures: what the profile measured (vllm 0.12.0 v1/worker/gpu_worker.py:326, vllm 0.23.0
v1/worker/gpu_worker.py:445, `non_torch_memory`; vllm 0.27.0 v1/worker/gpu_worker.py:526, vllm 0.32.0
v1/worker/gpu_worker.py:734, `total_consumed`), what it left (vllm 0.12.0 v1/worker/gpu_worker.py:341, vllm 0.32.0
v1/worker/gpu_worker.py:740, `available_kv_cache_memory_bytes`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from highwater_worker.devices import FAMILIES, is_host_memory
from highwater_worker.engine_view import (
    ENCODER_RUNNER,
    INIT_FREE,
    INIT_TOTAL,
    as_bool,
    as_float,
    as_int,
    as_text,
    configured_device,
    encoder_budget,
    first_of,
    look_up,
    parallel_size,
    short_text,
    vllm_version,
)
from highwater_worker.errors import Notes, printable
from highwater_worker.memory.start_phases import StartPhases
from highwater_worker.memory.storages import describe_groups, describe_layers

ENVIRONMENT = (
    *(name for family in FAMILIES for name in family.variables),
    *("PYTORCH_ALLOC_CONF", "VLLM_ENABLE_STARTUP_PLAN", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"),
)
"""The only variables that are read: each changes how much memory is used, and none holds a secret."""
_REQUESTED = ("requested_memory", "requested_cpu_memory")
_ASCEND_TAKES_GIVEN_BYTES = (0, 19)


_Source = tuple[Callable[[Any], Any], tuple[str, ...]]
"""A conversion of an attribute of the worker, and the paths where versions have it."""
_CONFIG, _MODEL, _SCHEDULER = "vllm_config.cache_config", "vllm_config.model_config", "vllm_config.scheduler_config"
_KV_CACHE = "model_runner.kv_cache_config"
_MEMORY: Mapping[str, _Source] = {
    "total_bytes": (as_int, INIT_TOTAL),
    "init_non_torch_bytes": (as_int, ("init_snapshot.non_torch_memory",)),
    "requested_bytes": (as_int, _REQUESTED),
    "weights_bytes": (as_int, ("model_runner.model_memory_usage",)),
    "peak_activation_bytes": (as_int, ("peak_activation_memory",)),
    "non_torch_bytes": (as_int, ("non_torch_memory",)),
    "total_consumed_bytes": (as_int, ("total_consumed",)),
    "graphs_estimate_bytes": (as_int, ("cudagraph_memory_estimate",)),
    "available_bytes": (as_int, ("available_kv_cache_memory_bytes",)),
    "init_free_bytes": (as_int, INIT_FREE),
    "utilization": (as_float, (f"{_CONFIG}.gpu_memory_utilization",)),
}
_CACHE: Mapping[str, _Source] = {
    "block_size": (as_int, (f"{_CONFIG}.block_size",)),
    "size_tokens": (as_int, (f"{_CONFIG}.kv_cache_size_tokens",)),
    "cpu_space_bytes": (as_int, (f"{_CONFIG}.cpu_kvcache_space_bytes",)),
    "blocks_override": (as_int, (f"{_CONFIG}.num_gpu_blocks_override",)),
    "cache_dtype": (short_text, (f"{_CONFIG}.cache_dtype",)),
    "mamba_cache_mode": (short_text, (f"{_CONFIG}.mamba_cache_mode",)),
    "prefix_caching": (as_bool, (f"{_CONFIG}.enable_prefix_caching",)),
    "max_concurrency": (as_float, (f"{_CONFIG}.kv_cache_max_concurrency",)),
    "blocks": (as_int, (f"{_KV_CACHE}.num_blocks",)),
}
_LIMITS: Mapping[str, _Source] = {
    "max_model_len": (as_int, (f"{_MODEL}.max_model_len",)),
    "max_num_batched_tokens": (as_int, (f"{_SCHEDULER}.max_num_batched_tokens",)),
    "max_num_seqs": (as_int, (f"{_SCHEDULER}.max_num_seqs",)),
    "max_encoder_tokens": (as_int, (f"{_SCHEDULER}.max_num_encoder_input_tokens",)),
    "v2_runner": (as_bool, ("use_v2_model_runner",)),
    "async_scheduling": (as_bool, (f"{_SCHEDULER}.async_scheduling",)),
    "hybrid_manager": (
        lambda value: None if value is None else not value,
        (f"{_SCHEDULER}.disable_hybrid_kv_cache_manager",),
    ),
    "sleep_mode": (as_bool, (f"{_MODEL}.enable_sleep_mode",)),
}
_EMBED_WIDTHS = (
    *("model.visual.out_hidden_size", "model.vision_tower.out_hidden_size"),
    *("inputs_embeds_size", f"{ENCODER_RUNNER}.hidden_size"),  # model runner V1, V2
)
_PARALLEL = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("prefill_context_parallel_size", "decode_context_parallel_size"),
)


def read_engine_budget(worker: object, start: StartPhases | None) -> dict[str, Any]:
    """Return the budget as one JSON object, unknown values as null; `start` is None where the plugin did not see it."""
    notes, cache = Notes(), first_of(worker, _KV_CACHE)
    groups = look_up(cache, "kv_cache_groups")

    def architecture() -> str | None:
        names = look_up(worker, "vllm_config", "model_config", "hf_config", "architectures")
        return short_text(names[0]) if isinstance(names, (list, tuple)) and names else None

    return {
        "vllm_version": vllm_version(),
        # The package itself states none (vllm-ascend 0.23.0.post1, 0.30.0rc2).
        "ascend_version": notes.attempt(
            "ascend_version", lambda: version("vllm-ascend") if "vllm_ascend" in sys.modules else None
        ),
        "torch_npu_version": as_text(look_up(sys.modules.get("torch_npu"), "__version__")),
        "architecture": notes.attempt("architecture", architecture),
        "dtype": notes.attempt("dtype", lambda: short_text(look_up(worker, "vllm_config", "model_config", "dtype"))),
        "memory": _memory(worker, start, notes),
        "kv_cache": {
            **_values(worker, _CACHE, notes),
            "given_bytes": notes.attempt("given_bytes", lambda: given_kv_bytes(worker)),
            "tensor_bytes": notes.attempt("tensor_bytes", lambda: _tensor_bytes(look_up(cache, "kv_cache_tensors"))),
            "groups": notes.attempt("groups", lambda: None if groups is None else describe_groups(groups)),
            "layers": notes.attempt("layers", lambda: _layers(groups, start)),
        },
        "limits": notes.attempt("limits", lambda: {name: _value(worker, _LIMITS[name]) for name in _LIMITS}),
        "encoder": notes.attempt("encoder", lambda: _encoder(worker, start, notes)),
        "parallel": {name: notes.attempt(name, partial(parallel_size, worker, name)) for name in _PARALLEL},
        "environment": {name: printable(os.environ[name]) for name in ENVIRONMENT if name in os.environ},
        "notes": notes.as_list(),
    }


def _value(worker: object, source: _Source) -> Any:  # noqa: ANN401 - the conversion's
    convert, paths = source
    return first_of(worker, *paths, convert=convert)


def _values(worker: object, sources: Mapping[str, _Source], notes: Notes) -> dict[str, Any]:
    return {name: notes.attempt(name, partial(_value, worker, source)) for name, source in sources.items()}


def _memory(worker: object, start: StartPhases | None, notes: Notes) -> dict[str, Any]:
    returned = {} if start is None else start.returned
    values = _values(worker, _MEMORY, notes)
    if is_host_memory(configured_device(worker)):
        # There it is what the whole machine's use grew by, other processes included (vllm 0.32.0 platforms/cpu.py:780).
        values["weights_bytes"] = None
    return {
        **values,
        # The estimate is made in any case, and counted where the variable says so: its default differs by version.
        "graphs_estimate_counted": as_bool(
            look_up(sys.modules.get("vllm.envs"), "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
        ),
        "returned_bytes": returned.get("profile"),
        "graphs_bytes": returned.get("graphs"),
    }


def _layers(groups: Iterable[object] | None, start: StartPhases | None) -> dict[str, Any] | None:
    if start is not None and start.kv_layers is not None:
        return start.kv_layers
    specs: dict[str, object] = {}
    for group in groups or ():
        shared = look_up(group, "kv_cache_spec")
        own = look_up(shared, "kv_cache_specs")
        specs.update({name: (own or {}).get(name, shared) for name in look_up(group, "layer_names") or ()})
    return {**describe_layers(specs), "are_grouped": True} if specs else None


def _tensor_bytes(tensors: Iterable[object] | None) -> int | None:
    if tensors is None:
        return None
    on_device = [tensor for tensor in tensors if not look_up(tensor, "host_resident")]
    sizes = [as_int(look_up(tensor, "size")) for tensor in on_device]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return None
    # Tensors with a stride lie in one allocation, of which each names the whole size (vllm 0.27.0
    # v1/core/kv_cache_utils.py:1351, vllm 0.32.0 v1/core/kv_cache_utils.py:1668,
    # vllm 0.33.0 v1/core/kv_cache_planning.py:722).
    is_packed = any(as_int(look_up(tensor, "block_stride")) for tensor in on_device)
    return max(known) if is_packed else sum(known)


def _encoder(worker: object, start: StartPhases | None, notes: Notes) -> dict[str, Any] | None:
    budget = encoder_budget(worker, look_up(start, "encoder_budget"))
    if budget is None:
        return None
    if budget["cache_size"] is None:
        notes.add("encoder", "this model runner keeps no budget, and the start was not seen to profile the encoder")
    return {
        **budget,
        "embed_width": first_of(look_up(worker, "model_runner"), *_EMBED_WIDTHS, convert=as_int),
        "embed_bytes": as_int(look_up(worker, "vllm_config", "model_config", "dtype", "itemsize")),
        "skips_profiling": first_of(worker, f"{_MODEL}.multimodal_config.skip_mm_profiling", convert=as_bool),
        "image_rule": notes.attempt("image_rule", lambda: _image_rule(worker)),
    }


def _image_rule(worker: object) -> dict[str, int | None] | None:
    """Return how images become tokens, where the processor's configuration has it: Qwen2-VL's and those after it.

    The command line's values go before (vllm 0.32.0 config/model.py:819, `hf_image_processor_config`).
    """
    model = look_up(worker, "vllm_config", "model_config")
    config: dict[str, Any] = {**(look_up(model, "hf_image_processor_config") or {})}
    config |= look_up(model, "multimodal_config", "mm_processor_kwargs") or {}
    size = config.get("size") or {}
    patch, merge = as_int(config.get("patch_size")), as_int(config.get("merge_size"))
    if not (patch and merge):
        return None
    return {
        "patch_size": patch,
        "merge_size": merge,
        "min_pixels": as_int(config.get("min_pixels") or size.get("shortest_edge")),
        "max_pixels": as_int(config.get("max_pixels") or size.get("longest_edge")),
    }


def read_budget(worker: object, notes: Notes) -> dict[str, Any]:
    """Return the memory that the engine was configured to take, and the free memory at its start; constant."""

    def requested() -> int | None:
        # With the KV cache's size given, the utilization has no effect: vLLM computes the number and leaves it unused
        # (vllm 0.32.0 v1/worker/gpu_worker.py:649, vllm 0.32.0 v1/worker/cpu_worker.py:213,
        # `determine_available_memory`).
        return None if given_kv_bytes(worker) is not None else first_of(worker, *_REQUESTED, convert=as_int)

    reads: dict[str, Callable[[], float | None]] = {
        "gpu_memory_utilization": lambda: _value(worker, _MEMORY["utilization"]),
        "requested_bytes": requested,
        "init_free_bytes": lambda: _value(worker, _MEMORY["init_free_bytes"]),
    }
    return {name: notes.attempt(f"budget.{name}", read) for name, read in reads.items()}


def given_kv_bytes(worker: object) -> int | None:
    """Return the size of the KV cache that a flag or a startup plan gives; None: none is given, or it has no effect.

    vllm-ascend before 0.19 ignores it: there the share of the device sizes the KV cache all the same (vllm_ascend
    0.18.0 worker/worker.py:339, vllm_ascend 0.23.0 worker/worker.py:540).
    """
    if "vllm_ascend" in sys.modules:
        release = re.match(r"(\d+)\.(\d+)", vllm_version() or "")
        if release is not None and tuple(map(int, release.groups())) < _ASCEND_TAKES_GIVEN_BYTES:
            return None
    return as_int(look_up(worker, "vllm_config", "cache_config", "kv_cache_memory_bytes"))
