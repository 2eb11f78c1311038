"""vLLM's control face, as one version of it shows it: an ASGI app with workers that hold bytes.

Used in process (`FakeEngine().transport()`) and on a real port. `tests/engine/test_contract.py` holds it to the real
engine. The default is the story's machine: two NPUs of 65,452,113,920 bytes, 54,650 MiB in use once up (57,766 as
npu-smi counts), and `serve_images()` makes it 58,432 (61,548). `core_on` wires the sidecar's core to it on a clock that
only tests move; with `recorders` its workers' recorders write a sample before each poll.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from packaging.version import Version
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gated_proxy.gate import Gate
from highwater.act.governor import Governor
from highwater.act.quiescer import Quiescer
from highwater.act.relief import Relief
from highwater.act.rules import Rule
from highwater.engine.client import Engine
from highwater.http.metrics import Counters
from highwater.model.components import account
from highwater.model.engine import SeenProcess
from highwater.model.rank import RankReading, WorkerMemory
from highwater.model.remedies import RemedyResult
from highwater.model.report import Report, Trigger
from highwater.process.clocks import Clocks
from highwater.server.parts import Parts
from highwater.server.settings import Settings
from highwater.server.settings.sections import GateSettings
from highwater.watch.history import History
from highwater.watch.poller import Poller
from highwater.watch.recorder.recorders import Recorders
from highwater.watch.sources import EngineBudgets, Source, polled_sources
from tests.fakes.clock import FakeClock, FakeWallClock
from tests.fakes.recorders import FakeProc, FakeRecorder, monotonic

MIB = 1024 * 1024
EXTENSION = "highwater_worker.MemoryExtension"
TOTAL = 65_452_113_920
# npu-smi counts that much of its 65,536 MiB which mem_get_info, the sidecar's unit and TOTAL's, does not.
NPU_SMI_ONLY = 3_116 * MIB
USED_READY = 57_766 * MIB - NPU_SMI_ONLY
USED_AFTER = 61_548 * MIB - NPU_SMI_ONLY
WEIGHTS = 31_459_200_000
KV_POOL = 21_540_531_712
OTHER_TENSORS = 256 * MIB
NON_TORCH = 1_178 * MIB
CACHED = USED_READY - WEIGHTS - KV_POOL - OTHER_TENSORS - NON_TORCH
IMAGES = 31  # of 122 MiB: 3,782 MiB, the growth of the benchmark
IMAGE_BYTES = 122 * MIB
NODE = 512 * 1024 * MIB
NO_HISTORY = "PyTorch keeps no allocation history on cpu; it does on npu and cuda"
NO_SNAPSHOT = "PyTorch's memory snapshot is not taken on cpu; it is on npu and cuda devices"
RECORDER_RATE, RECORDER_SECONDS = 10.0, 10.0
_WIRE = TypeAdapter(tuple[WorkerMemory, ...])


def changed(**changes: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Return a `FakeEngine.garble` that changes the last rank's answer."""
    return lambda answers: {"results": [json.dumps(a) for a in (*answers[:-1], answers[-1] | changes)]}


@dataclass
class FakeWorker:
    """One worker: where its bytes are. What is freed moves to torch's cached blocks, and `release` gives those back."""

    rank: int
    dp_rank: int
    pid: int
    tp_rank: int = 0
    pp_rank: int = 0
    ooms: int = 0
    pid_started: int | None = 123456  # the number that FakeProc tells
    skew: float = 0.0  # its machine's clock is set so many seconds ahead of ours
    weights: int = WEIGHTS
    kv_cache: int = KV_POOL
    other_tensors: int = OTHER_TENSORS
    cached: int = CACHED
    non_torch: int = NON_TORCH
    total: int = TOTAL
    requested: int = TOTAL * 9 // 10
    rss: int = 6 * 1024 * MIB
    pinned: int = 512 * MIB
    host_used: int = 128 * 1024 * MIB
    host_limit: int = NODE
    entries: dict[str, int] = field(default_factory=dict)
    spilled: dict[str, int] = field(default_factory=dict)
    spills: int = 0
    restores: int = 0
    entries_a_call: int = 1_000_000  # that a trim or restore moves before its time is up
    seen_at: dict[str, float] = field(default_factory=dict)
    recorder: FakeRecorder = field(default_factory=FakeRecorder)

    @property
    def allocated(self) -> int:
        return self.weights + self.kv_cache + self.other_tensors + sum(self.entries.values())

    @property
    def used(self) -> int:
        return self.allocated + self.cached + self.non_torch

    @property
    def trimmable(self) -> int:
        """All of them, less one for the way back where none is away yet."""
        kept = 0 if self.spilled else max(self.entries.values(), default=0)
        return max(0, sum(self.entries.values()) - kept)

    def forget_entries(self) -> None:
        self.cached += sum(self.entries.values())
        self.entries.clear()
        self.rss -= sum(self.spilled.values())
        self.spilled.clear()
        self.seen_at.clear()

    def device(self) -> dict[str, Any]:
        return {
            "type": "npu",
            "index": self.rank,
            "physical_index": 8 * self.dp_rank + self.rank,
            "name": "Ascend910B3",
            "uuid": f"npu-{self.dp_rank}-{self.rank}",
        }

    def record(self, now: float) -> None:
        self.recorder.record(self.memory(now), self.entries, now)

    def memory(self, now: float) -> dict[str, Any]:
        for name in self.entries:
            self.seen_at.setdefault(name, now)
        oldest = max((now - at for at in self.seen_at.values()), default=None)
        return {
            "device": self.device(),
            "total_bytes": self.total,
            "free_bytes": self.total - self.used,
            "used_bytes": self.used,
            "torch": {
                "allocated_bytes": self.allocated,
                "reserved_bytes": self.allocated + self.cached,
                "peak_allocated_bytes": self.allocated + OTHER_TENSORS,
                "inactive_split_bytes": 0,
                "alloc_retries": 0,
                "ooms": self.ooms,
            },
            "releasable_bytes": self.cached,
            "trimmable_bytes": self.trimmable,
            "weights_bytes": self.weights,
            "kv_cache_bytes": self.kv_cache,
            "kv_cache_reserved_bytes": self.kv_cache,
            "encoder_cache": self.totals() | {"oldest_age_seconds": oldest},
            "asleep_tags": [],
            "budget": {
                "gpu_memory_utilization": 0.9,
                "requested_bytes": self.requested,
                "init_free_bytes": TOTAL - NON_TORCH,
            },
            "host_memory": {
                "rss_bytes": self.rss,
                "cgroup_used_bytes": self.host_used,
                "cgroup_limit_bytes": self.host_limit,
                "node_total_bytes": NODE,
                "node_available_bytes": NODE - self.host_used,
                "pinned_bytes": self.pinned,
                "cgroup_oom_kills": 0,
            },
            "notes": [],
            "elapsed_ms": 1.5,
        }

    def totals(self) -> dict[str, Any]:
        return {
            "entries": len(self.entries) + len(self.spilled),
            "device_bytes": sum(self.entries.values()),
            "host_bytes": sum(self.spilled.values()),
            "host_entries": len(self.spilled),
            "capacity_embeds": 16_384,
            "embeds": 256 * (len(self.entries) + len(self.spilled)),
            "oldest_age_seconds": None,
            "restore_reserve_bytes": 0,
            "spills": self.spills,
            "restores": self.restores,
            "restore_seconds": 0.001 * self.restores,
        }

    def trim(self, free_bytes: int | None = None, keep_bytes: int | None = None, **other: Any) -> dict[str, Any]:
        """Oldest first, until the target is met; none: everything. Ages and budgets are not told apart here."""
        del other
        if keep_bytes is not None:
            free_bytes = max(sum(self.entries.values()) - keep_bytes, 0)
        gone, moved = 0, []
        for name in list(self.entries)[: self.entries_a_call]:
            if free_bytes is not None and gone >= free_bytes:
                break
            size = self.entries.pop(name)
            self.spilled[name] = size
            moved.append(name)
            self.cached, self.rss, self.spills, gone = self.cached + size, self.rss + size, self.spills + 1, gone + size
        left = list(self.entries) if free_bytes is None or gone < free_bytes else []
        return {
            "kind": "dict",
            "asked_bytes": free_bytes,
            "spilled_entries": len(moved),
            "spilled_bytes": gone,
            "host_bytes_added": gone,
            "complete": not left,
            "remaining_entries": len(left),
            "remaining_bytes": sum(self.entries.values()) if free_bytes is None else max(0, free_bytes - gone),
            "kept": {"needed_entries": 0, "over_budget_entries": 0, "unspillable_entries": 0},
            "encoder_cache": self.totals(),
            "copy_seconds": 0.01,
            "notes": [],
            "elapsed_ms": 12.0,
        }

    def restore(self) -> dict[str, Any]:
        back = {name: self.spilled.pop(name) for name in list(self.spilled)[: self.entries_a_call]}
        self.entries |= back
        self.rss, self.restores = self.rss - sum(back.values()), self.restores + len(back)
        return {
            "restored_entries": len(back),
            "restored_bytes": sum(back.values()),
            "left_entries": len(self.spilled),
            "complete": not self.spilled,
            "remaining_entries": len(self.spilled),
            "remaining_bytes": sum(self.spilled.values()),
            "encoder_cache": self.totals(),
            "copy_seconds": 0.01,
            "notes": [],
            "elapsed_ms": 12.0,
        }

    def encoder_cache(self, now: float, limit: int = 100, sort: str = "bytes") -> dict[str, Any]:
        rows = [
            {
                "mm_hash": name,
                "shape": [256, 8192],
                "dtype": "bfloat16",
                "bytes": size,
                "storage_bytes": size,
                "shared_with": 0,
                "age_seconds": now - self.seen_at.setdefault(name, now),
                "idle_seconds": None,
                "residency": "device",
                "referenced": False,
            }
            for name, size in self.entries.items()
        ]
        rows.sort(key=lambda row: row["age_seconds" if sort == "age" else "bytes"], reverse=True)
        return {
            "present": True,
            "entries": rows[:limit],
            "entries_total": len(rows),
            "storages": len(rows),
            "device_bytes": sum(self.entries.values()),
            "host_bytes": sum(self.spilled.values()),
            "capacity_embeds": 16_384,
            **{key: value for key, value in self.totals().items() if key in {"spills", "restores", "restore_seconds"}},
        }

    def release(self) -> dict[str, Any]:
        before, self.cached = self._figures(), 0
        after = self._figures()
        return {
            "before": before,
            "after": after,
            "freed_bytes": after["free_bytes"] - before["free_bytes"],
            "freed_pinned_bytes": 0,
            "gc_collected": 0,
            "mechanism": "empty_cache",
            "notes": [],
            "elapsed_ms": 450.0,
        }

    def _figures(self) -> dict[str, int]:
        return {
            "free_bytes": self.total - self.used,
            "reserved_bytes": self.allocated + self.cached,
            "allocated_bytes": self.allocated,
            "rss_bytes": self.rss,
            "pinned_bytes": self.pinned,
        }


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    @property
    def op(self) -> str | None:
        """The operation, where it was a call to the workers."""
        return json.loads(self.body)["args"][0] if self.path == "/collective_rpc" else None


class FakeEngine:
    """The app. Every public attribute is a knob that a test may turn at any time.

    Args:
        version: What `/version` says; routes, parameters and answers follow it as vLLM's do.
        dev_mode: `VLLM_SERVER_DEV_MODE`.
        extension: `--worker-extension-cls`, or None. Any class is taken to inherit from ours.
        openapi: False is `--disable-fastapi-docs`.
        tensor_parallel: Workers per stage.
        pipeline_parallel: Stages per engine.
        data_parallel: Engines; as with the real one, `/collective_rpc` is for all and returns engine 0's answers only.
        proc: Where the workers' processes are told of, for who reads their recorders.
        clock: What `taken_at` is read from.
    """

    def __init__(
        self,
        version: str = "0.32.0",
        *,
        dev_mode: bool = True,
        extension: str | None = EXTENSION,
        openapi: bool = True,
        tensor_parallel: int = 2,
        pipeline_parallel: int = 1,
        data_parallel: int = 1,
        proc: FakeProc | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.version, self.dev_mode, self.extension, self.openapi = version, dev_mode, extension, openapi
        self.tensor_parallel, self.pipeline_parallel = tensor_parallel, pipeline_parallel
        self.data_parallel = data_parallel
        self.model = "Qwen/Qwen3-VL-32B-Instruct"
        self.running, self.waiting, self.kv_usage, self.paused, self.asleep = 0, 0, 0.0, False, False
        self.requests_ended = 0
        self.mute = False  # --disable-log-stats
        self.root_path = ""  # --root-path
        self.tokens = 0  # prompt tokens so far; they move when it works
        self.plugin = False  # the workers have our operations, whatever class was named
        self.kv_connector: str | None = None
        self.waiting_by_reason: dict[str, int] = {}  # an older version has none
        # Of a second data-parallel engine: the requests that run and wait, its tokens, and why they wait.
        self.second: tuple[int, int, int, dict[str, int]] | None = None
        self.ec_connector = False
        self.encoder_decoder = False  # a model as Whisper is
        self.prefix_blocks_in_use = False
        self.down = False
        self.broken: list[bool] = []  # whether the next connections break; the last first
        self.late: set[str] = set()  # paths that do not answer in time
        self.failing: dict[str, int] = {}  # paths that answer with this status
        self.on_reset: Callable[[], object] = lambda: None  # called at every reset
        self.hang: asyncio.Event | None = None  # worker calls wait for it
        self.garble: Callable[[list[dict[str, Any]]], object] | None = None  # makes a worker call's whole body
        self.workers_refuse: str | None = None  # why trim and restore are refused
        # What `snapshot` answers, less its head; None: an error, as on CPU.
        self.stacks: Callable[[FakeWorker, dict[str, Any]], dict[str, Any]] | None = None
        self.snapshot: Callable[[FakeWorker, dict[str, Any]], dict[str, Any]] | None = None
        # What `budget` answers; None: an error, as of an older worker package.
        self.budget: dict[str, Any] | None = None
        self.breaks = False  # the connection breaks at a worker call's answer
        self.calls: list[Call] = []
        self.rpcs_in_flight = 0
        self.most_rpcs_in_flight = 0
        self._clock, self.proc = clock, proc
        self._pids = iter(range(4242, 10_000))
        self.workers: list[FakeWorker] = []
        self.start_again()

    def start_again(self) -> None:
        """Another process at the same address: new pids, nothing cached."""
        for worker in self.workers:
            self.kill(worker)
        self.workers = [
            FakeWorker(rank, dp_rank, next(self._pids), rank % self.tensor_parallel, rank // self.tensor_parallel)
            for dp_rank in range(self.data_parallel)
            for rank in range(self.tensor_parallel * self.pipeline_parallel)
        ]
        for worker in self.workers:
            if self.proc is not None:
                self.proc.begin(worker.pid)

    def kill(self, worker: FakeWorker) -> None:
        worker.recorder.close()
        if self.proc is not None:
            self.proc.end(worker.pid)

    def start_recorders(self, folder: Path, instance: str = "a" * 16) -> None:
        """What the plugin does as the workers come up: they can be called then, and say so."""
        self.plugin = True
        told = {
            "ranks_expected": len(self.workers),
            "data_parallel": self.data_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "tensor_parallel": self.tensor_parallel,
            "model": self.model,
            "rpc": True,
            "self_started": True,
        }
        for worker in self.workers:
            head = self._identity(worker) | told
            options = {"directory": str(folder), "instance": instance}
            worker.recorder.start(head, options, worker.device(), self._clock())

    def record(self) -> None:
        for worker in self.workers:
            worker.record(self._clock())

    def begin_step(self) -> None:
        for worker in self.workers:
            worker.recorder.step_since = worker.recorder.last_step_at = self._clock()

    def end_step(self) -> None:
        for worker in self.workers:
            worker.recorder.step_since, worker.recorder.last_step_at = None, self._clock()
            worker.recorder.steps += 1

    def serve_images(self, count: int = IMAGES, size: int = IMAGE_BYTES) -> None:
        """As many new images through the encoder: each rank keeps a copy of each output."""
        self.tokens += count * 256
        for worker in self.workers:
            first = len(worker.entries)
            worker.entries |= {f"{first + number:064x}": size for number in range(count)}

    def reload(self, version: str) -> None:
        self.version = version
        self.start_again()

    def asked(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    def ops(self) -> list[str]:
        return [call.op or "" for call in self.asked("/collective_rpc")]

    def polled(self) -> list[str]:
        """The operations of polls: new workers are asked for their budget once, whatever is polled then."""
        return [op for op in self.ops() if op != "budget"]

    def resets(self) -> list[str]:
        """What it was told to do, oldest first; to read the workers' memory, or to record it, is not."""
        looks = {"memory", "budget", "recorder_start", "recorder_stop"}
        acted = [call for call in self.calls if call.method == "POST" and call.op not in looks]
        return [call.op or call.path for call in acted]

    def readings(self) -> tuple[RankReading, ...]:
        reached = [worker for worker in self.workers if worker.dp_rank == 0]
        return tuple(map(account, _WIRE.validate_python([self._answer(worker, "memory") for worker in reached])))

    def transport(self) -> httpx.AsyncBaseTransport:
        """A transport that ends here, and that can lose the connection or the patience."""
        return _Transport(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            request = Request(scope, receive)
            body = await request.body()
            query = scope["query_string"].decode("latin-1")
            self.calls.append(Call(scope["method"], scope["path"], query, dict(request.headers), body))
            receive = _replay(body)
        await Starlette(routes=self._routes())(scope, receive, send)

    # --- routes, by version ---

    def _has(self, version: str) -> bool:
        return Version(self.version) >= Version(version)

    def _table(self) -> dict[str, tuple[str, Callable[[Request], Any], tuple[str, ...]]]:
        dev, pausing = self.dev_mode, self._has("0.12") and (self.dev_mode or not self._has("0.16"))
        rows = (
            (True, "/version", "GET", lambda _: JSONResponse({"version": self.version}), ()),
            (True, "/health", "GET", _empty, ()),
            (True, "/metrics", "GET", self._metrics, ()),
            (True, "/v1/models", "GET", lambda _: JSONResponse({"data": [{"id": self.model}]}), ()),
            (dev, "/collective_rpc", "POST", self._collective_rpc, ()),
            (dev, "/server_info", "GET", self._server_info, ("config_format",)),
            (dev, "/reset_prefix_cache", "POST", self._reset_prefix_cache, ("reset_running_requests",)),
            (dev and self._has("0.11.2"), "/reset_mm_cache", "POST", self._reset_mm_cache, ()),
            (dev and self._has("0.16"), "/reset_encoder_cache", "POST", self._reset_encoder_cache, ()),
            (dev, "/sleep", "POST", _empty, ("level", "mode")),
            (dev, "/is_sleeping", "GET", lambda _: JSONResponse({"is_sleeping": self.asleep}), ()),
            (pausing, "/pause", "POST", self._pause, ()),
            (pausing, "/resume", "POST", self._resume, ()),
            (pausing, "/is_paused", "GET", lambda _: JSONResponse({"is_paused": self.paused}), ()),
        )
        return {path: (method, handler, names) for there, path, method, handler, names in rows if there}

    def _routes(self) -> list[Route]:
        routes = [
            Route(path, self._or_fail(handler), methods=[method])
            for path, (method, handler, _) in self._table().items()
        ]
        if self.openapi:
            routes.append(Route("/openapi.json", self._openapi_page))
        return routes

    def _or_fail(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if request.url.path in self.failing:
                return PlainTextResponse("Internal Server Error", self.failing[request.url.path])
            answered = handler(request)
            return await answered if asyncio.iscoroutine(answered) else answered

        return answer

    def _openapi_page(self, _: Request) -> Response:
        # /metrics is a mount and not listed, as in vLLM.
        paths = {
            path: {method.lower(): {"parameters": [{"name": name, "in": "query"} for name in names]}}
            for path, (method, _, names) in self._table().items()
            if path != "/metrics"
        }
        servers = {"servers": [{"url": self.root_path}]} if self.root_path else {}
        return JSONResponse({"openapi": "3.1.0", "paths": paths, **servers})

    def _server_info(self, request: Request) -> Response:
        if request.query_params.get("config_format") != "json":
            return JSONResponse({"vllm_config": "model='...', as text"})
        parallel = {
            "worker_extension_cls": self.extension or "",
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "data_parallel_size": self.data_parallel,
            "distributed_executor_backend": "mp",
        }
        config = {
            "model_config": {
                "model": "/models/qwen3-vl",
                "served_model_name": self.model,
                "hf_config": {"is_encoder_decoder": self.encoder_decoder},
            },
            "parallel_config": parallel,
            "cache_config": {"gpu_memory_utilization": 0.9},
            "kv_transfer_config": {"kv_connector": self.kv_connector, "kv_role": "kv_producer"}
            if self.kv_connector
            else None,
            "ec_transfer_config": {"ec_connector": "ECExampleConnector"} if self.ec_connector else None,
        }
        return JSONResponse({"vllm_config": config})

    def _metrics(self, _: Request) -> Response:
        if self.mute:
            return PlainTextResponse("")
        labels = f'engine="0",model_name="{self.model}"'
        usage = "vllm:kv_cache_usage_perc" if self._has("0.12") else "vllm:gpu_cache_usage_perc"
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {float(self.running)}",
            "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{{{labels}}} {float(self.waiting)}",
            f"# HELP {usage} KV-cache usage. 1 means 100 percent usage.",
            f"# TYPE {usage} gauge",
            f"{usage}{{{labels}}} {self.kv_usage}",
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.",
            "# TYPE vllm:prompt_tokens_total counter",
            f"vllm:prompt_tokens_total{{{labels}}} {float(self.tokens)}",
        ]
        if self.requests_ended:
            lines += [
                "# HELP vllm:request_success_total Count of successfully processed requests.",
                "# TYPE vllm:request_success_total counter",
                f'vllm:request_success_total{{{labels},finished_reason="stop"}} {float(self.requests_ended)}',
            ]
        if self.waiting_by_reason:
            name = "vllm:num_requests_waiting_by_reason"
            lines += [f"# HELP {name} Number of waiting requests by reason.", f"# TYPE {name} gauge"]
            lines += [f'{name}{{{labels},reason="{why}"}} {float(n)}' for why, n in self.waiting_by_reason.items()]
        if self.second is not None:
            running, waiting, tokens, reasons = self.second
            second = labels.replace('"0"', '"1"')
            lines += [
                f"vllm:num_requests_running{{{second}}} {float(running)}",
                f"vllm:num_requests_waiting{{{second}}} {float(waiting)}",
                f"vllm:prompt_tokens_total{{{second}}} {float(tokens)}",
                *(
                    f'vllm:num_requests_waiting_by_reason{{{second},reason="{why}"}} {float(n)}'
                    for why, n in reasons.items()
                ),
            ]
        if self._has("0.11.2"):
            lines += ["# HELP vllm:engine_sleep_state Engine sleep state.", "# TYPE vllm:engine_sleep_state gauge"]
            state = {"awake": not self.asleep, "weights_offloaded": self.asleep, "discard_all": False}
            lines += [
                f'vllm:engine_sleep_state{{{labels},sleep_state="{name}"}} {float(on)}' for name, on in state.items()
            ]
        return PlainTextResponse("\n".join(lines) + "\n")

    # --- what Highwater never asks for ---

    def _pause(self, _: Request) -> Response:
        self.paused = True
        return JSONResponse({"status": "paused"})

    def _resume(self, _: Request) -> Response:
        self.paused = False
        return JSONResponse({"status": "resumed"})

    # --- resets ---

    def _reset_prefix_cache(self, _: Request) -> Response:
        self.on_reset()
        if self._has("0.26"):
            return JSONResponse({"success": not self.prefix_blocks_in_use})
        return Response()

    def _reset_mm_cache(self, _: Request) -> Response:
        self.on_reset()
        for worker in self.workers:
            worker.host_used -= min(worker.host_used, 1024 * MIB)
        return Response()

    def _reset_encoder_cache(self, _: Request) -> Response:
        self.on_reset()
        for worker in self.workers:
            worker.forget_entries()
        return Response()

    # --- worker calls ---

    async def _collective_rpc(self, request: Request) -> Response:
        call = await request.json()
        if "method" not in call:
            return JSONResponse({"detail": "Missing 'method' in request body"}, 400)
        if (self.extension is None and not self.plugin) or call["method"] != "highwater_rpc":
            return PlainTextResponse("Internal Server Error", 500)  # and the real one's queues are out of step now
        self.rpcs_in_flight += 1
        self.most_rpcs_in_flight = max(self.most_rpcs_in_flight, self.rpcs_in_flight)
        try:
            await (self.hang.wait() if self.hang is not None else asyncio.sleep(0))
        finally:
            self.rpcs_in_flight -= 1
        told = [(worker, self._answer(worker, *call["args"])) for worker in self.workers]
        answers = [answer for worker, answer in told if worker.dp_rank == 0]
        if self.garble is not None:
            return JSONResponse(self.garble(answers))
        return JSONResponse({"results": [json.dumps(answer) for answer in answers]})

    def _identity(self, worker: FakeWorker) -> dict[str, Any]:
        return {
            "rank": worker.rank,
            "local_rank": worker.rank,
            "dp_rank": worker.dp_rank,
            "tp_rank": worker.tp_rank,
            "pp_rank": worker.pp_rank,
            "host": "node-a",
            "pid": worker.pid,
            "pid_started": worker.pid_started,
            "taken_at": self._clock() + worker.skew,
        }

    def _answer(self, worker: FakeWorker, op: str, payload: str = "{}") -> dict[str, Any]:
        now, recorder, identity = self._clock(), worker.recorder, self._identity(worker)
        bodies: dict[str, Callable[[], dict[str, Any]]] = {
            "memory": lambda: worker.memory(now),
            "encoder_cache": lambda: worker.encoder_cache(now, **json.loads(payload)),
            "release": worker.release,
            "trim": lambda: worker.trim(**json.loads(payload)),
            "restore": worker.restore,
            "recorder_start": lambda: recorder.start(identity, json.loads(payload), worker.device(), now),
            "recorder_stop": lambda: recorder.stop(now, **json.loads(payload)),
        }
        if op == "record_stacks":
            error = {"code": "unavailable", "message": NO_HISTORY}
            body = {"ok": False, "error": error} if self.stacks is None else self.stacks(worker, json.loads(payload))
            return {"schema": 1, "ok": True, "op": op, **identity} | body
        if op == "snapshot":
            body = {"ok": False, "error": {"code": "unavailable", "message": NO_SNAPSHOT}}
            if self.snapshot is not None:
                body = self.snapshot(worker, json.loads(payload))
            return {"schema": 1, "ok": True, "op": op, **identity} | body
        if op == "budget" and self.budget is not None:
            return {"schema": 1, "ok": True, "op": op, **identity, "start": [], "engine_budget": self.budget}
        refused = self.workers_refuse if op in {"trim", "restore"} else None
        failed = recorder.refuses if op == "recorder_start" else None
        if refused is not None or failed is not None:
            error = {"code": "refused" if refused else "failed", "message": refused or failed}
            return {"schema": 1, "ok": False, "op": op, **identity, "error": error}
        head = {"schema": 1, "ok": op in bodies, "op": op, **identity}
        if op not in bodies:
            return head | {"error": {"code": "unknown_op", "message": f"op {op!r} is unknown"}}
        return head | bodies[op]()


def _empty(_: Request) -> Response:
    return Response()


def _replay(body: bytes) -> Callable[[], Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


class _Transport(httpx.AsyncBaseTransport):
    """To the fake without a socket. What a socket would do, lose the connection or be late, it does on demand."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._asgi = httpx.ASGITransport(app=engine)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._engine.down:
            raise httpx.ConnectError("All connection attempts failed", request=request) from ConnectionRefusedError()
        if self._engine.broken and self._engine.broken.pop():
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)
        if request.url.path in self._engine.late:
            raise httpx.ReadTimeout("", request=request)
        response = await self._asgi.handle_async_request(request)
        if self._engine.breaks and request.url.path == "/collective_rpc":
            raise httpx.ReadError("", request=request)
        return response


# --- the core, wired to it ---


class Counted(Counters):
    """Counts polls, remedies and the policy's acts, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.polls = 0
        self.actions: list[tuple[str, str, str]] = []
        self.failures: list[tuple[str, str]] = []
        self.remedies: list[tuple[str, Trigger, str]] = []

    def polled(self, seconds: float) -> None:
        super().polled(seconds)
        self.polls += 1

    def poll_failed(self, source: str, reason: str) -> None:
        super().poll_failed(source, reason)
        self.failures.append((source, reason))

    def remedy_ended(self, result: RemedyResult, trigger: Trigger) -> None:
        super().remedy_ended(result, trigger)
        self.remedies.append((result.remedy, trigger, result.outcome))

    def policy_acted(self, rule: str, remedy: str, outcome: str) -> None:
        super().policy_acted(rule, remedy, outcome)
        self.actions.append((rule, remedy, outcome))


@dataclass
class SeenProcesses:
    """What a test shows of the engine's processes beside its workers, as `EngineProcesses` has it."""

    one: Callable[[], SeenProcess | None] = lambda: None
    lives: Callable[[], Any] = lambda: (0.0, ())
    stopped: Callable[[], str | None] = lambda: None
    silent_core: Callable[[], Any] = lambda: None
    unseen_starts: str = ""


@dataclass
class Core:
    """Poller, governor and history on one fake engine and one fake clock."""

    fake: FakeEngine
    clock: FakeClock
    engine: Engine
    history: History
    poller: Poller
    governor: Governor
    relief: Relief
    gate: Gate
    quiescer: Quiescer
    counted: Counted
    wall: FakeWallClock
    processes: SeenProcesses
    recorders: Recorders | None = None

    async def tick(self, seconds: float = 1.0, *, spare_idle: bool = False) -> Report:
        """Let time pass, have the recorders write, poll once, and let the policy look at it."""
        self.clock.advance(seconds)
        self.fake.record()
        report = await self.poller.poll(spare_idle=spare_idle)
        await self.governor.consider()
        return report

    def summaries(self, kind: str | None = None) -> list[str]:
        """What the events say, oldest first."""
        return [event.summary for event in reversed(self.history.events()) if kind in {None, event.kind}]


def core_on(
    version: str = "0.32.0",
    *,
    rules: Sequence[Rule] = (),
    mode: Any = "act",
    sources: Callable[[Engine, EngineBudgets], Sequence[Source]] = polled_sources,
    engine_has_extension: bool = False,
    rpc_deadline_seconds: float = 0.02,
    recorder_dir: Path | None = None,
    state_file: Path | None = None,
    **knobs: Any,
) -> Core:
    """Wire the core on a fake engine and clock; `knobs` are FakeEngine's.

    With a folder in `recorder_dir` the workers have recorders, beneath it.
    """
    clock, counted = FakeClock(), Counted()
    proc = FakeProc(recorder_dir / "proc") if recorder_dir is not None else None
    wall = FakeWallClock(clock)
    fake = FakeEngine(version, clock=clock, proc=proc, **knobs)
    settings = Settings(
        engine_url="http://engine:8000",
        engine_has_extension=engine_has_extension,
        rpc_deadline_seconds=rpc_deadline_seconds,
        state_file=state_file,
        gate=GateSettings(drain_seconds=0.05),
    )
    parts = Parts(settings, Clocks(clock, wall), transport=fake.transport())
    parts.counters = counted
    parts.processes = processes = SeenProcesses()
    if recorder_dir is not None and proc is not None:
        parts.recorders = recorders_on(fake, parts.engine, clock, recorder_dir / "recorder", proc)
    parts.sources = sources(parts.engine, parts.budgets)
    parts.governor.rules, parts.governor.mode = tuple(rules), mode
    for listener in (parts.quiescer.notice, parts.governor.notice):
        parts.reports.subscribe(listener)
    return Core(
        fake=fake,
        clock=clock,
        engine=parts.engine,
        history=parts.history,
        poller=parts.poller,
        governor=parts.governor,
        relief=parts.relief,
        gate=parts.data.gate,
        quiescer=parts.quiescer,
        counted=counted,
        wall=wall,
        processes=processes,
        recorders=parts.recorders,
    )


def recorders_on(fake: FakeEngine, engine: Engine, clock: FakeClock, folder: Path, proc: FakeProc) -> Recorders:
    """The sidecar's side of the recorders, on the same clock; while it waits, they write."""

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        fake.record()

    return Recorders(
        engine,
        folder,
        rate=RECORDER_RATE,
        seconds=RECORDER_SECONDS,
        clocks=Clocks(monotonic(clock), clock),
        sleep=sleep,
        proc=proc.path,
    )
