"""The engine's settings that decide about host memory, read once from a worker's configuration."""

from __future__ import annotations

import os
from typing import Any

from highwater_worker.attributes import fraction, look_up, text, whole
from highwater_worker.errors import printable

_MAX_TEXT = 40


def engine_settings(worker: object) -> dict[str, Any]:
    """Return what this engine shows of them; what it does not show is missing.

    Args:
        worker: vLLM's, of any version.
    """
    model, parallel = look_up(worker, "vllm_config", "model_config"), look_up(worker, "vllm_config", "parallel_config")
    media = look_up(model, "multimodal_config")
    found = {
        "mm_processor_cache_gb": fraction(look_up(media, "mm_processor_cache_gb")),
        "mm_processor_cache_type": _word(look_up(media, "mm_processor_cache_type")),
        "is_multimodal": None if model is None else media is not None,
        # Private, and the only place: vllm 0.12.0 config/parallel.py:253, vllm 0.27.0 config/parallel.py:379.
        "api_servers": whole(look_up(parallel, "_api_process_count")),
        "data_parallel": whole(look_up(parallel, "data_parallel_size")),
        "data_parallel_local": whole(look_up(parallel, "data_parallel_size_local")),
        "tensor_parallel": whole(look_up(parallel, "tensor_parallel_size")),
        "pipeline_parallel": whole(look_up(parallel, "pipeline_parallel_size")),
        "nodes": whole(look_up(parallel, "nnodes")),
        "executor": _word(look_up(parallel, "distributed_executor_backend")),
        "device": _word(look_up(worker, "vllm_config", "device_config", "device_type")),
        "external_lb": _flag(look_up(parallel, "data_parallel_external_lb")),
        "kv_offload": look_up(worker, "vllm_config", "kv_transfer_config") is not None
        or bool(look_up(worker, "vllm_config", "cache_config", "kv_offloading_size")),
        "max_chunk_mb": _number(os.environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB")),
    }
    return {name: value for name, value in found.items() if value is not None}


def _word(value: object) -> str | None:
    word = text(value)
    return None if word is None else printable(word, _MAX_TEXT)


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None
