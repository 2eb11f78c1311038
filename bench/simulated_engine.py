"""A server that speaks vLLM's control face with eight ranks and full encoder caches, without computing anything.

It stands in for an engine that this machine cannot run: what is measured in front of it is the sidecar. It is the fake
engine of the tests, with as much to report as a real one has. Run as `python -m bench.simulated_engine PORT`, or with
a folder and `idle` or `work` behind it: then its workers' recorders write into that folder, as of such an engine.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from highwater.terminal.demo.process import KeptProcess, environ_with, free_port
from tests.fakes.engine import FakeEngine

RANKS = 8
ENTRIES = 1000
RECORDED_ENTRIES = 500
BEAT_SECONDS = {"idle": 1.0, "work": 0.1}
START_SECONDS = 60.0
_ENTRY_BYTES = 4 * 1024**2
_HISTOGRAMS, _BUCKETS = 24, 30  # as large a page as a vLLM with one engine shows


Activity: TypeAlias = Literal["idle", "work"]
Lifespan: TypeAlias = Callable[[Starlette], AbstractAsyncContextManager[None]]


class SimulatedEngine(KeptProcess):
    """The server below, or that of another module, as a process of its own, listening once it is started.

    Args:
        folder: Gets its log.
        module: What is run.
        recorded: The folder that its workers' recorders write into, and what they record; none without it.
    """

    def __init__(
        self,
        folder: Path,
        module: str = "bench.simulated_engine",
        *,
        recorded: tuple[Path, Activity] | None = None,
    ) -> None:
        super().__init__("the simulated engine", folder / "simulated_engine.log")
        self._module = module
        self._recorded = () if recorded is None else tuple(map(str, recorded))
        self._port = free_port()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> SimulatedEngine:
        command = [sys.executable, "-m", self._module, str(self._port), *self._recorded]
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
        time.sleep(BEAT_SECONDS["idle"])


def create_app() -> ASGIApp:
    """The fake engine, and vLLM's metrics as long as they really are."""
    engine = FakeEngine(tensor_parallel=RANKS)
    engine.serve_images(ENTRIES, _ENTRY_BYTES)
    threading.Thread(target=_record, args=(engine,), daemon=True).start()
    return _with_long_metrics(engine)


def create_recorded_app(folder: Path, activity: Activity) -> ASGIApp:
    """The same with recorders, and without development mode."""
    engine = FakeEngine(tensor_parallel=RANKS, dev_mode=False)
    engine.serve_images(RECORDED_ENTRIES, _ENTRY_BYTES)
    engine.start_recorders(folder)
    return Starlette(routes=[Mount("/", _with_long_metrics(engine))], lifespan=_recording(engine, activity))


def _recording(engine: FakeEngine, activity: Activity) -> Lifespan:
    async def record() -> None:
        while True:
            if activity == "work":
                engine.end_step()
            engine.record()
            await asyncio.sleep(BEAT_SECONDS[activity])

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(record())
        yield
        task.cancel()
        await asyncio.wait({task})

    return lifespan


def _with_long_metrics(engine: FakeEngine) -> ASGIApp:
    metrics = PlainTextResponse(_metrics())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (metrics if scope.get("path") == "/metrics" else engine)(scope, receive, send)

    return app


if __name__ == "__main__":
    port, *recorded = sys.argv[1:]
    made = (
        create_recorded_app(Path(recorded[0]), "work" if recorded[1] == "work" else "idle")
        if recorded
        else create_app()
    )
    uvicorn.run(made, host="127.0.0.1", port=int(port), log_level="warning", timeout_keep_alive=5)
