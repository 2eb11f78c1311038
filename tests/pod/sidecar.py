"""Sidecars in containers of their own beside one engine, each told less or more of it, and what they say."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from highwater.terminal.demo.sidecar import DemoSidecar
from tests.patience import LIMIT_SECONDS
from tests.pod.pod import Pod

LIMIT_BYTES = 1024**3
LOOK_SECONDS, SETTLE_LOOKS = 0.5, 120
BOTH, RECORDERS, LOG, NEITHER = ALL = "recorders and log", "recorders", "log", "neither"


class PodSidecar(DemoSidecar):
    """`highwater serve` in a container; `sees` is its name in a test."""

    def __init__(self, pod: Pod, sees: str, engine_url: str, settings: Mapping[str, str]) -> None:
        container = pod.container(f"highwater-{sees.replace(' ', '-')}", limit_bytes=LIMIT_BYTES)
        folder = Path(mkdtemp(prefix=f"{container.name}-", dir=pod.folder))  # nothing of an earlier one
        state = {"HIGHWATER_STATE_FILE": str(folder / "state.json"), "HIGHWATER_POLL_SECONDS": "0.5"}
        super().__init__(engine_url, folder=folder, settings=state | dict(settings))
        self.sees = sees
        self._process = container
        self.log_path = container.log_path

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", "/memory")
        return found

    def health(self) -> int:
        """Return the status of `/health/deep`, which a liveness probe asks."""
        return httpx.get(f"{self.control_url}/health/deep", timeout=LIMIT_SECONDS, trust_env=False).status_code

    def incidents(self) -> list[dict[str, Any]]:
        listed = self.call("GET", "/memory/incidents")["incidents"]
        return [self.call("GET", f"/memory/incidents/{each['id']}") for each in listed]

    def text(self) -> str:
        listed = self.call("GET", "/memory/incidents")["incidents"]
        paths = [f"/memory/incidents/{each['id']}?format=text" for each in listed]
        pages = [httpx.get(self.control_url + path, timeout=LIMIT_SECONDS, trust_env=False).text for path in paths]
        return "\n".join([*(each["summary"] for each in listed), *pages, *map(str, self.events())])

    def events(self) -> list[dict[str, Any]]:
        """Return what happened, the newest first."""
        found = self.call("GET", "/memory/events")
        return list(found["events"] if isinstance(found, dict) else found)

    def command(self, *words: str) -> str:
        run = [sys.executable, "-m", "highwater", *words, "--url", self.control_url]
        return subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False).stdout

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 where there is none."""
        return sum(
            each.value for each in self._samples() if each.name == name and labels.items() <= each.labels.items()
        )

    def samples_with(self, word: str) -> float:
        """Return the highest sample whose name or whose labels have this word; 0 where there is none."""
        named = [each.value for each in self._samples() if word in each.name or word in each.labels.values()]
        return max(named, default=0.0)

    def _samples(self) -> list[Sample]:
        page = httpx.get(f"{self.control_url}/metrics", timeout=LIMIT_SECONDS, trust_env=False).text
        return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


Sidecars = Mapping[str, PodSidecar]


@contextmanager
def sidecars_beside(pod: Pod, engine_url: str, recorder: Path, log: Path, **settings: str) -> Iterator[Sidecars]:
    """Start one for each of `BOTH`, `RECORDERS`, `LOG` and `NEITHER`, without anything that others have learned."""
    told = {
        BOTH: {"HIGHWATER_RECORDER_DIR": str(recorder), "HIGHWATER_ENGINE_LOG": str(log)},
        RECORDERS: {"HIGHWATER_RECORDER_DIR": str(recorder)},
        LOG: {"HIGHWATER_ENGINE_LOG": str(log)},
        NEITHER: {},
    }
    with ExitStack() as stack:
        each = {sees: PodSidecar(pod, sees, engine_url, known | settings) for sees, known in told.items()}
        for sidecar in each.values():
            stack.enter_context(sidecar)
        yield each


def settle(sidecars: Sidecars, holds: Callable[[PodSidecar], object], looks: int = SETTLE_LOOKS) -> None:
    """Give every sidecar time until it holds for all; where it never does, the test that comes next says what lacks."""
    for _ in range(looks):
        if all(holds(sidecar) for sidecar in sidecars.values()):
            return
        time.sleep(LOOK_SECONDS)
