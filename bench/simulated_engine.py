"""A server that speaks vLLM's control face with eight ranks and full encoder caches, without computing anything.

It stands in for an engine that this machine cannot run: what is measured in front of it is the sidecar. Run as
`python -m bench.simulated_engine PORT`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Body, FastAPI, Response
from fastapi.responses import PlainTextResponse

from app.capabilities import EXTENSION
from app.demo.process import KeptProcess, environ_with, free_port

RANKS = 8
ENTRIES = 1000
VERSION = "0.32.0"
START_SECONDS = 60.0
GIB = 1024**3
MIB = 1024**2
_ENTRY_BYTES = 4 * MIB
_HISTOGRAMS, _BUCKETS = 24, 30  # as large a page as a vLLM with one engine shows
_EMPTY_POSTS = ("/reset_mm_cache", "/reset_prefix_cache", "/reset_encoder_cache")


class SimulatedEngine(KeptProcess):
    """The server below, or that of another module, as a process of its own, listening once it is started."""

    def __init__(self, folder: Path, module: str = "bench.simulated_engine") -> None:
        super().__init__("the simulated engine", folder / "simulated_engine.log")
        self._module = module
        self._port = free_port()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> SimulatedEngine:
        command = [sys.executable, "-m", self._module, str(self._port)]
        self.start(command, env=environ_with({}), cwd=Path(__file__).resolve().parent.parent)
        self.wait_until_answers(self._port, "/health", START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _head(op: str, rank: int) -> dict[str, Any]:
    place = {"rank": rank, "local_rank": rank, "dp_rank": 0, "tp_rank": rank, "pp_rank": 0}
    return {"schema": 1, "ok": True, "op": op, **place, "host": "node-a", "pid": 4000 + rank, "taken_at": time.time()}


def _memory(rank: int) -> dict[str, Any]:
    cache_bytes = ENTRIES * _ENTRY_BYTES
    allocated, reserved = 52 * GIB + cache_bytes, 54 * GIB + cache_bytes
    total, used = 64 * GIB, reserved + GIB
    return _head("memory", rank) | {
        "device": {"type": "npu", "index": rank, "name": "Ascend910B3"},
        "total_bytes": total,
        "free_bytes": total - used,
        "used_bytes": used,
        "torch": {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "peak_allocated_bytes": allocated,
            "inactive_split_bytes": 128 * MIB,
            "alloc_retries": 0,
            "ooms": 0,
        },
        "weights_bytes": 18 * GIB,
        "kv_cache_bytes": 32 * GIB,
        "kv_cache_reserved_bytes": 32 * GIB,
        "encoder_cache": {
            "entries": ENTRIES,
            "device_bytes": cache_bytes,
            "host_bytes": 0,
            "capacity_embeds": 256 * ENTRIES,
            "oldest_age_seconds": 600.0,
        },
        "budget": {"gpu_memory_utilization": 0.9, "requested_bytes": 57 * GIB, "init_free_bytes": 63 * GIB},
        "host_memory": {
            "rss_bytes": 4 * GIB,
            "cgroup_used_bytes": 80 * GIB,
            "cgroup_limit_bytes": 512 * GIB,
            "node_total_bytes": 1024 * GIB,
            "node_available_bytes": 900 * GIB,
        },
        "notes": [],
        "elapsed_ms": 3.0,
    }


def _encoder_cache(rank: int) -> dict[str, Any]:
    entries = [
        {
            "mm_hash": f"{index:064x}",
            "shape": [256, 8192],
            "dtype": "bfloat16",
            "bytes": _ENTRY_BYTES,
            "storage_bytes": _ENTRY_BYTES,
            "shared_with": 0,
            "age_seconds": round(index * 0.6, 3),
            "residency": "device",
            "referenced": False,
        }
        for index in range(ENTRIES)
    ]
    totals = {"entries_total": ENTRIES, "storages": ENTRIES, "device_bytes": ENTRIES * _ENTRY_BYTES, "host_bytes": 0}
    return _head("encoder_cache", rank) | {"present": True, "entries": entries} | totals


def _results(op: str) -> bytes:
    answer = {"memory": _memory, "encoder_cache": _encoder_cache}.get(op, lambda rank: _head(op, rank))
    return json.dumps({"results": [json.dumps(answer(rank)) for rank in range(RANKS)]}).encode()


def _metrics() -> str:
    labels = 'engine="0",model_name="simulated"'
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    lines = [line for name in gauges for line in (f"# TYPE {name} gauge", f"{name}{{{labels}}} 0.0")]
    for number in range(_HISTOGRAMS):
        name = f"vllm:simulated_{number}_seconds"
        lines += [f"# HELP {name} Histogram of something in seconds.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{{labels},le="{bucket}.0"}} 0.0' for bucket in range(1, _BUCKETS)]
        lines += [f'{name}_bucket{{{labels},le="+Inf"}} 0.0', f"{name}_count{{{labels}}} 0.0"]
        lines += [f"{name}_sum{{{labels}}} 0.0"]
    return "\n".join(lines) + "\n"


_CONFIG: Mapping[str, Any] = {
    "parallel_config": {
        "worker_extension_cls": EXTENSION,
        "tensor_parallel_size": RANKS,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "distributed_executor_backend": "mp",
    },
    "cache_config": {"gpu_memory_utilization": 0.9},
    "model_config": {"served_model_name": ["simulated"], "model": "simulated"},
}


def create_app() -> FastAPI:
    """The routes that detection, polls and listings ask for."""
    app = FastAPI()
    metrics = _metrics()
    # Rendered once: listing them is the workers' cost on a real engine, spread over eight processes.
    listing = _results("encoder_cache")

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"vllm_config": _CONFIG}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": False}

    @app.get("/metrics")
    async def exposition() -> PlainTextResponse:
        return PlainTextResponse(metrics)

    @app.post("/collective_rpc")
    async def collective_rpc(method: str = Body(), args: list[str] = Body()) -> Response:  # noqa: B008 - FastAPI's way
        assert method == "highwater_rpc"
        body = listing if args[0] == "encoder_cache" else _results(args[0])
        return Response(body, media_type="application/json")

    for path in _EMPTY_POSTS:
        app.add_api_route(path, health, methods=["POST"])
    return app


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_keep_alive=5)
