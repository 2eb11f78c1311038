"""A small engine as a process of its own, and the product's sidecar beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from socket import create_server
from types import TracebackType
from typing import Any, Self

from bench.device.small_engine import Options
from bench.device.torch_device import TorchDevice

START_SECONDS = 400.0
_LOOK_SECONDS = 0.2


class EngineEndedError(Exception):
    """The small engine ended while it started; the text has the end of its log."""


class EngineProcess:
    """The small engine; a context manager that starts it and ends it.

    Args:
        on: The device.
        folder: Gets its log.
        load: What its steps do to the device's memory.
        recorder: Arguments of `recorder_start`; None without one.
    """

    def __init__(self, on: TorchDevice, folder: Path, load: str, *, recorder: Mapping[str, Any] | None = None) -> None:
        self.log_path = folder / "engine.log"
        self._begin = folder / "begin"
        with create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._options = Options(str(on.device), self._port, load, str(self._begin), recorder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.device.small_engine", json.dumps(asdict(self._options))]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while self.steps() is None:
            if not self.is_running() or time.monotonic() > deadline:
                self._stop()
                raise EngineEndedError(self.log_end())
            time.sleep(_LOOK_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def begin(self) -> None:
        """Let the load begin."""
        self._begin.touch()

    def is_running(self) -> bool:
        """Return whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def steps(self) -> int | None:
        """Return the number of steps taken, None where it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/steps", timeout=30) as response:
                return int(json.load(response)["steps"])
        except OSError:
            return None

    def wait_for_its_end(self, seconds: float) -> bool:
        """Wait until it has ended, at most so long, and return whether it has."""
        deadline = time.monotonic() + seconds
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return not self.is_running()

    def log_end(self) -> str:
        """Return the last lines that it wrote."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-1500:]

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def sidecar_with_defaults(url: str, folder: Path, **settings: str) -> Iterator[Any]:
    """Run `highwater serve` beside an engine, and yield it once it has read the worker.

    Args:
        url: The engine's.
        folder: Gets its log.
        settings: Settings by key, for files and folders; the policy stays as it is by default.

    Raises:
        ImportError: A module that the sidecar needs is not installed here.
    """
    # Late: the other steps run where no module of the sidecar's is installed.
    sidecar_beside = import_module("bench.sidecar").sidecar_beside
    for name in ("fastapi", "uvicorn", "yaml", "tabulate", "prometheus_client"):
        import_module(name)
    with sidecar_beside(url, folder, **settings) as sidecar:
        yield sidecar
