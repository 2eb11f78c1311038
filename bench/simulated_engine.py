"""A server that speaks vLLM's control face with eight ranks and full encoder caches, without computing anything.

It stands in for an engine that this machine cannot run: what is measured in front of it is the sidecar. It is the fake
engine of the tests, with as much to report as a real one has. Run as `python -m bench.simulated_engine PORT`.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from highwater.demo.process import KeptProcess, environ_with, free_port
from tests.fakes.engine import FakeEngine

RANKS = 8
ENTRIES = 1000
START_SECONDS = 60.0
_ENTRY_BYTES = 4 * 1024**2
_HEARTBEAT_SECONDS = 1.0
_HISTOGRAMS, _BUCKETS = 24, 30  # as large a page as a vLLM with one engine shows


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


def _record(engine: FakeEngine) -> None:
    """Write heartbeats as idle workers do, where a sidecar has started their recorders."""
    while True:
        engine.record()
        time.sleep(_HEARTBEAT_SECONDS)


def create_app() -> ASGIApp:
    """The fake engine, and vLLM's metrics as long as they really are."""
    engine, metrics = FakeEngine(tensor_parallel=RANKS), PlainTextResponse(_metrics())
    engine.serve_images(ENTRIES, _ENTRY_BYTES)
    threading.Thread(target=_record, args=(engine,), daemon=True).start()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (metrics if scope.get("path") == "/metrics" else engine)(scope, receive, send)

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_keep_alive=5)
