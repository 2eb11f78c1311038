"""The role of this process in vLLM, by the name under which it was started, and its engine's settings.

vLLM names its processes where it makes them: `ApiServer_0` (vllm 0.12.0 v1/utils.py:210, vllm 0.32.0 v1/utils.py:250),
`APIServer_DPRank_0` (vllm 0.32.0 entrypoints/launchers/dp_supervisor.py:405), `EngineCore_DP0` and `EngineCore` (vllm
0.12.0 v1/engine/utils.py:123, vllm 0.32.0 v1/engine/utils.py:284), `VllmWorker-0` (vllm 0.12.0
v1/executor/multiproc_executor.py:598, vllm 0.32.0 v1/executor/multiproc_executor.py:747) and `VLLM_DP_Coordinator`
(vllm 0.12.0 v1/engine/coordinator.py:80, vllm 0.32.0 v1/engine/coordinator.py:106). The main process is the API server
where it started no other.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from highwater_worker.attributes import flag, fraction, look_up, short_text, whole

_NAMES = (
    (re.compile(r"API_?Server(?:_DPRank)?_?([0-9]{0,6})", re.IGNORECASE), "api_server"),
    (re.compile(r"(?:DP)?EngineCore(?:Actor)?(?:_DP([0-9]{1,6}))?"), "engine_core"),
    (re.compile(r"(?:Vllm)?Worker[-_]([0-9]{1,6})"), "worker"),
    (re.compile(r"VLLM_DP_Coordinator()"), "coordinator"),
)
_API_SERVER = re.compile(r"API_?Server", re.IGNORECASE)
_MAX_TEXT = 40
_COMMAND = re.compile(r"(?:^|/)(?:vllm|api_server\.py)$")
_SERVES = re.compile(r"serve|vllm|api_server|openai", re.IGNORECASE)


class Role(NamedTuple):
    """A role, and which of several it is; the names are those of the file."""

    role: str
    number: int | None = None


def role_of(name: str, children: Iterable[str] = (), arguments: Sequence[str] = ()) -> Role:
    """Return the role of a process, by its name in `multiprocessing`, its children's names and its command line."""
    for pattern, role in _NAMES:
        match = pattern.fullmatch(name)
        if match is not None:
            return Role(role, int(match[1]) if match[1] else None)
    if name != "MainProcess":
        return Role("other")
    if any(_API_SERVER.match(child) for child in children):
        return Role("launcher")
    if any("EngineCore" in child for child in children) or any(_SERVES.search(word) for word in arguments[:2]):
        # `vllm serve`, `python -m vllm.entrypoints.openai.api_server`: the first words name it
        return Role("api_server")
    return Role("other")


def own_role() -> Role:
    return role_of(multiprocessing.current_process().name, _children(), sys.argv)


def _children() -> list[str]:
    # Not `active_children()`, which waits for those that have ended: they are vLLM's to wait for.
    known = getattr(multiprocessing.process, "_children", ())
    return [str(getattr(child, "name", "")) for child in list(known)]


def serves_grpc(arguments: Sequence[str]) -> bool | None:
    """Return whether a command line opens a gRPC port; None where it is not vLLM's own, or reads a file of settings.

    Processes that vLLM starts have the command line of the one that it began with.
    """
    words = [word.replace("_", "-") for word in arguments[1:]]
    if any(word.startswith("--grpc") for word in words):
        return True
    is_known = bool(arguments) and _COMMAND.search(arguments[0]) is not None
    return False if is_known and not any(word.partition("=")[0] == "--config" for word in words) else None


def engine_settings(worker: object) -> dict[str, Any]:
    config = look_up(worker, "vllm_config")
    model, parallel = look_up(config, "model_config"), look_up(config, "parallel_config")
    media, chunk = look_up(model, "multimodal_config"), os.environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", "")
    settings = {
        "mm_processor_cache_gb": fraction(look_up(media, "mm_processor_cache_gb")),
        "mm_processor_cache_type": short_text(look_up(media, "mm_processor_cache_type"), _MAX_TEXT),
        "is_multimodal": None if model is None else media is not None,
        # Private, and the only place: vllm 0.12.0 config/parallel.py:253, vllm 0.27.0 config/parallel.py:379.
        "api_servers": whole(look_up(parallel, "_api_process_count")),
        "data_parallel": whole(look_up(parallel, "data_parallel_size")),
        "data_parallel_local": whole(look_up(parallel, "data_parallel_size_local")),
        "tensor_parallel": whole(look_up(parallel, "tensor_parallel_size")),
        "pipeline_parallel": whole(look_up(parallel, "pipeline_parallel_size")),
        "nodes": whole(look_up(parallel, "nnodes")),
        "executor": short_text(look_up(parallel, "distributed_executor_backend"), _MAX_TEXT),
        "device": short_text(look_up(config, "device_config", "device_type"), _MAX_TEXT),
        "external_lb": flag(look_up(parallel, "data_parallel_external_lb")),
        "kv_offload": look_up(config, "kv_transfer_config") is not None
        or bool(look_up(config, "cache_config", "kv_offloading_size")),
        "grpc": serves_grpc(sys.argv),
        "max_chunk_mb": int(chunk) if chunk.isdigit() else None,
    }
    return {name: value for name, value in settings.items() if value is not None}
