"""The parts that the benchmarks share: a folder, and one real engine, started when the first of them asks for it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import httpx

from bench.machine import cpu_seconds
from highwater.engine.client import RPC_METHOD
from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions, ensure_environment
from highwater.terminal.demo.process import DemoError

CALL_SECONDS = 60.0


class Stage:
    """A context manager that ends all that was started on it."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def folder(self) -> Path:
        """For logs; removed at the end."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="highwater-bench-")))

    @cached_property
    def environment(self) -> EngineEnvironment:
        """The engine's; installed where the first who asks for it finds none."""
        return ensure_environment(announce=print)

    @cached_property
    def engine(self) -> DemoEngine:
        """A vLLM with the tiny multimodal model and our extension; whoever uses it leaves its caches as they fall."""
        print("starting vLLM ...", flush=True)
        engine = DemoEngine(self.environment, EngineOptions(), folder=self.folder / "engine")
        return self._stack.enter_context(engine)

    def worker_op(self, op: str, payload: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call an operation of the engine's first worker, past any sidecar, and return its result.

        Raises:
            DemoError: The worker refused it.
        """
        body = {"method": RPC_METHOD, "args": [op, json.dumps(payload or {})]}
        response = self._client.post(f"{self.engine.url}/collective_rpc", json=body)
        answer: dict[str, Any] = json.loads(response.raise_for_status().json()["results"][0])
        if not answer["ok"]:
            raise DemoError(f"{op}: {answer['error']}")
        return answer

    @cached_property
    def _client(self) -> httpx.Client:
        return self._stack.enter_context(httpx.Client(timeout=CALL_SECONDS, trust_env=False))

    def cpu_seconds(self) -> float:
        """CPU time of the benchmarks so far: this process, all that it started and that has ended, and the engine."""
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        engine: DemoEngine | None = self.__dict__.get("engine")
        return own + sum(cpu_seconds(pid) for pid in engine.pids()) if engine is not None else own
