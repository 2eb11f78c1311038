"""vLLM's control face over one worker of the kit: a step loop that the sidecar can stand beside, and that can die.

`python -m bench.device.small_engine JSON` serves `/collective_rpc` and what else the sidecar asks for, and takes steps
on the main thread; calls of the worker run between two steps, as in vLLM. What each step does to the device's memory is
its *load*. When a step fails the error ends the process, as it ends an engine.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from bench.device.torch_device import GIB, MIB, Tensor, TorchDevice
from bench.device.worker import KitWorker

VERSION = "0.32.0"
EXTENSION = "highwater_worker.MemoryExtension"
MODEL = "device-kit"
STEP_SECONDS = 0.1
CALL_SECONDS = 60.0
SLACK_BYTES = 4 * GIB
"""The part of a device that the engine's plan leaves over."""
WORKSPACE_BYTES = 512 * MIB
"""The bytes that a library takes from the driver within a step, past PyTorch's allocator."""
PHASE_STEPS = 256
PIECES = (16, 24, 36)
"""Sizes in MiB of a step's tensors, one a phase: freed segments of one size are too small for the next."""
CPU_ROOM_BYTES = 512 * MIB


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        device: `cuda:0`, `npu:0` or `cpu`.
        port: The port to listen on, at 127.0.0.1.
        load: A name of `LOADS`.
        begin: The file at whose appearance the load begins; None: at once. Until then steps are calm.
        recorder: Arguments of `recorder_start`; None without a recorder.
    """

    device: str
    port: int
    load: str
    begin: str | None = None
    recorder: Mapping[str, Any] | None = None


@dataclass
class Call:
    """A call of the worker that waits for its turn between two steps."""

    arguments: tuple[Any, ...]
    done: threading.Event = field(default_factory=threading.Event)
    answer: str = ""


class SmallEngine:
    """The loop and its face.

    Args:
        options: How to run.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._on = TorchDevice(options.device)
        self._calls: queue.Queue[Call] = queue.Queue()
        self.steps = 0
        self._worker = KitWorker(self._on, images=2, requested_bytes=_plan(self._on))
        self._hog: list[Tensor] = []

    def serve(self) -> None:
        """Take steps until one fails.

        Raises:
            RuntimeError: A step found no memory, as its load wanted.
        """
        options = self._options
        if options.recorder is not None:
            self._worker.call("recorder_start", **options.recorder)
        load = LOADS[options.load](self._on, self._hog)
        server = ThreadingHTTPServer(("127.0.0.1", options.port), _handler(self))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began: int | None = None
        while True:
            if began is None and (options.begin is None or os.path.exists(options.begin)):
                began = self.steps
                self._worker.during_step = partial(self._load, load, began)
            # Looked up at each step, as an engine does: the recorder puts a wrapper on the worker.
            self._worker.execute_model()
            self.steps += 1
            self._answer_calls(time.monotonic() + STEP_SECONDS)

    def _load(self, load: Callable[[int], None], first: int) -> None:
        load(self.steps - first)

    def call(self, arguments: tuple[Any, ...]) -> str:
        """Run a call of the worker between two steps; from another thread."""
        call = Call(arguments)
        self._calls.put(call)
        if not call.done.wait(CALL_SECONDS):
            raise TimeoutError(f"no step ended within {CALL_SECONDS:g} s")
        return call.answer

    def _answer_calls(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            try:
                call = self._calls.get(timeout=left)
            except queue.Empty:
                return
            call.answer = self._worker.highwater_rpc(*call.arguments)
            call.done.set()

    def page(self, path: str) -> object:
        """Return what a GET gets: JSON, text, or None where there is no such page."""
        pages: dict[str, object] = {
            "/health": "",
            "/version": {"version": VERSION},
            "/v1/models": {"data": [{"id": MODEL}]},
            "/server_info": {"vllm_config": _config()},
            "/is_sleeping": {"is_sleeping": False},
            "/is_paused": {"is_paused": False},
            "/metrics": _metrics(self.steps),
            "/openapi.json": {"openapi": "3.1.0", "paths": {path: {} for path in _PATHS}},
            "/steps": {"steps": self.steps},
        }
        return pages.get(path)


_PATHS = ("/collective_rpc", "/server_info", "/is_sleeping", "/is_paused", "/version", "/health", "/v1/models")


def _handler(engine: SmallEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = engine.page(urlsplit(self.path).path)
            self._send(HTTPStatus.NOT_FOUND if page is None else HTTPStatus.OK, page)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if urlsplit(self.path).path != "/collective_rpc":
                self._send(HTTPStatus.NOT_FOUND, None)
                return
            self._send(HTTPStatus.OK, {"results": [engine.call(tuple(body.get("args", ())))]})

        def log_message(self, *_: object) -> None:
            """Write nothing: the log is the engine's."""

        def _send(self, status: HTTPStatus, page: object) -> None:
            content = (page if isinstance(page, str) else json.dumps(page)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(page, str) else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _config() -> dict[str, Any]:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    return {
        "model_config": {"model": MODEL, "served_model_name": MODEL},
        "parallel_config": {**parallel, "worker_extension_cls": EXTENSION, "distributed_executor_backend": "uni"},
        "cache_config": {"gpu_memory_utilization": 0.9},
    }


def _metrics(steps: int) -> str:
    labels = f'engine="0",model_name="{MODEL}"'
    gauges = {"num_requests_running": 1.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.5}
    lines = [line for name, value in gauges.items() for line in _metric(name, "gauge", labels, value)]
    return "\n".join([*lines, *_metric("prompt_tokens_total", "counter", labels, 256.0 * steps)]) + "\n"


def _metric(name: str, kind: str, labels: str, value: float) -> tuple[str, str]:
    return f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {value}"


# --- loads: each is made once with the device, and called at every step with the number of the step ---


def _plan(on: TorchDevice) -> int | None:
    return None if on.is_cpu else on.space()[1] - SLACK_BYTES


def _calm(on: TorchDevice, _: list[Tensor]) -> Callable[[int], None]:
    def step(number: int) -> None:
        on.empty(on.sizes.temporary_bytes // (1 + number % 4)).zero_()

    return step


def _grow(on: TorchDevice, hog: list[Tensor]) -> Callable[[int], None]:
    """Return steps whose temporary tensors leave a reserve behind, and that need a workspace of the driver's."""
    # The KV cache of such an engine: all that its plan allows.
    left = on.space()[0] - SLACK_BYTES
    while left > 0:
        hog.append(on.empty(min(left, 8 * GIB)))
        left -= 8 * GIB

    def step(number: int) -> None:
        phase, turn = divmod(number, PHASE_STEPS)
        size = PIECES[phase % len(PIECES)] * MIB
        most = 2 * GIB // size
        pieces = [on.empty(size) for _ in range(1 + turn * most // PHASE_STEPS)]
        workspace = on.driver_allocation(WORKSPACE_BYTES)
        del pieces
        on.wait()
        workspace.give_back()

    return step


def _fill(on: TorchDevice, hog: list[Tensor]) -> Callable[[int], None]:
    """Return steps that keep what they allocate; on a CPU within a bound, for the machine's sake."""

    def step(number: int) -> None:
        if on.is_cpu and number == 0:
            room = _virtual_bytes() + CPU_ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
        hog.append(on.empty(64 * MIB if on.is_cpu else 4 * GIB))

    return step


def _virtual_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _fragment(on: TorchDevice, hog: list[Tensor]) -> Callable[[int], None]:
    """Return a step that leaves every segment half in use, and then wants one large piece."""

    def step(_: int) -> None:
        pieces = []
        try:
            while True:
                pieces.append(on.empty(9 * MIB))  # two of them share a segment of 20 MiB
        except RuntimeError:
            hog.extend(pieces[::2])
        pieces.clear()
        hog.append(on.empty(2 * GIB))

    return step


def _workspace(on: TorchDevice, hog: list[Tensor]) -> Callable[[int], None]:
    """Return a step in which a library finds no room: PyTorch's allocator holds all of the device, in use."""
    factor, product = on.randn(4096, 4096), on.randn(4096, 4096)

    def multiply() -> None:
        on.torch.mm(factor, factor, out=product)
        on.wait()

    def step(_: int) -> None:
        size = 4 * GIB
        while size >= 2 * MIB:
            try:
                hog.append(on.empty(size))
            except RuntimeError:
                size //= 2
        # On a new thread a library begins anew: it wants a handle and a workspace of its own.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(multiply).result()
        on.driver_allocation(WORKSPACE_BYTES)  # where that was enough for it

    return step


LOADS: Mapping[str, Callable[[TorchDevice, list[Tensor]], Callable[[int], None]]] = {
    "calm": _calm,
    "grow": _grow,
    "fill": _fill,
    "fragment": _fragment,
    "workspace": _workspace,
}

if __name__ == "__main__":
    SmallEngine(Options(**json.loads(sys.argv[1]))).serve()
