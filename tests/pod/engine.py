"""The engine of the pod: a real vLLM that records itself and grows where it is told, requests for it, and a hog."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from highwater.terminal.demo.engine import DemoEngine, EngineEnvironment, EngineOptions, build_model
from tests.engines import watching
from tests.patience import LIMIT_SECONDS
from tests.pod.pod import Container

HERE = Path(__file__).parent
PAUSE_SECONDS = 0.05
ASK_SECONDS = 20.0


class PodEngine(DemoEngine):
    """A real engine that a kubelet starts: it has a model, a command and an environment.

    It records itself into `folder/recorder`, has no development mode, and carries a plugin that grows where it is told.
    """

    def __init__(self, environment: EngineEnvironment, folder: Path, **options: object) -> None:
        self.recorder = folder / "recorder"
        self.order = folder / "grow"
        plugin = _plugin(folder / "grower")
        watched = watching(self.recorder, HIGHWATER_TEST_GROW=str(self.order))
        super().__init__(environment, EngineOptions(**{**watched, **options}), folder=folder)
        build_model(self.folder / "model", multimodal=True)
        self.command = self._command()
        self.env = self._environ()
        self.env["PYTHONPATH"] += os.pathsep + str(plugin)

    def requests_running(self) -> int:
        page = httpx.get(f"{self.url}/metrics", timeout=LIMIT_SECONDS, trust_env=False).text
        return sum(
            int(float(value)) for value in re.findall(r"^vllm:num_requests_running\S* (\S+)$", page, re.MULTILINE)
        )

    def grow(self, role: str, size_bytes: int, seconds: float) -> None:
        """Have a process of it (`EngineCore`, `Worker`, `APIServer`) take so much, evenly over a time."""
        draft = self.order.with_suffix(".tmp")
        draft.write_text(f"{role} {size_bytes} {seconds}")
        draft.replace(self.order)


def _plugin(folder: Path) -> Path:
    info = folder / "test_grower-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "grower.py", folder / "test_grower.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-grower\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ntest_grower = test_grower:register\n")
    return folder


class Load:
    """Requests one after the other, from two clients, until the end of the block; what fails is asked again.

    While `may_ask` is not set there are none.
    """

    def __init__(self, url: str, model: str) -> None:
        self._body = {"model": model, "prompt": "words " * 8, "max_tokens": 32, "ignore_eos": True}
        self._url = f"{url}/v1/completions"
        self._is_done = threading.Event()
        self.may_ask = threading.Event()
        self.may_ask.set()
        self._threads = [threading.Thread(target=self._ask, name="client") for _ in range(2)]
        self.answered = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=ASK_SECONDS, trust_env=False) as client:
            while not self._is_done.wait(PAUSE_SECONDS):
                if self.may_ask.is_set():
                    with suppress(httpx.HTTPError):
                        self.answered += client.post(self._url, json=self._body).status_code == httpx.codes.OK


def hog(container: Container, size_bytes: int, *, victim: int, seconds: float = 0.0) -> None:
    """Have another process of the container take so much memory, at once or evenly; the kernel is to kill the victim.

    By size alone it would choose the hog. Where several processes fill a container it is the engine's largest one.
    """
    Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
    container.run([sys.executable, "-I", "-S", str(HERE / "hog.py"), str(size_bytes), str(seconds)])
