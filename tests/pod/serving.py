"""An engine that serves requests in a pod, and what each sidecar says once something has happened to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from highwater.terminal.demo.engine import EngineEnvironment
from highwater.terminal.demo.process import answers
from tests.pod.engine import Load, PodEngine
from tests.pod.kubelet import Kubelet, wait_for_start
from tests.pod.pod import Container, Ended, Pod, why_not
from tests.pod.sidecar import ALL, BOTH, RECORDERS, PodSidecar, Sidecars, settle, sidecars_beside

PROBE_SECONDS = 12.0
"""Three of them are longer than a dying engine takes to end by itself; the chart has two minutes in all."""


@dataclass(frozen=True)
class Said:
    """What one sidecar said after something happened.

    Attributes:
        incidents: Whole, the newest first.
        text: Of incidents and events, for people.
        oom_kills: By its metrics, once the next container runs.
    """

    incidents: list[dict[str, Any]]
    events: list[dict[str, Any]]
    text: str
    oom_kills: float


@dataclass(frozen=True)
class Outcome:
    """What Kubernetes would say, and each sidecar."""

    state: Ended
    by: Mapping[str, Said]


@dataclass
class Serving:
    """A pod with an engine whose liveness is asked of the sidecar that sees the most."""

    pod: Pod
    engine: PodEngine
    container: Container
    probed: list[PodSidecar] = field(default_factory=list)
    load: Load | None = None

    def is_alive(self) -> bool:
        try:
            return all(each.health() != httpx.codes.SERVICE_UNAVAILABLE for each in self.probed)
        except httpx.HTTPError:  # a sidecar that starts or ends
            return True

    def has_started(self) -> bool:
        return answers(self.engine.port, "/health")

    @contextmanager
    def watched(self) -> Iterator[Sidecars]:
        """Start fresh sidecars beside an engine that starts, and requests once it serves; all have seen it then."""
        with sidecars_beside(self.pod, self.engine.url, self.engine.recorder, self.container.log_path) as sidecars:
            wait_for_start(lambda: all(is_seen(each) for each in sidecars.values()))
            self.probed = [sidecars[BOTH]]
            # Through a sidecar, as in a pod.
            with Load(sidecars[BOTH].url, self.engine.served_model) as load:
                self.load = load
                wait_for_start(lambda: load.answered)  # the first answer of a start takes long
                yield sidecars
            self.probed = []

    def wait_for_next(
        self, sidecars: Sidecars, end: Callable[[], object], kubelet: Kubelet, *, known_to: Collection[str] = ALL
    ) -> Outcome:
        """Do what ends the engine; return what is said once its next life writes a file, and some know of an incident.

        No request is made of that life: the answers would cost most of a processor, and show nothing.
        """
        ended, files = len(kubelet.states), self._process_files()
        end()
        kubelet.wait_for_ends(ended + 1)
        if self.load is not None:
            self.load.may_ask.clear()
        wait_for_start(lambda: self.container.starts > ended + 1 and self._process_files() - files)
        settle({sees: sidecars[sees] for sees in known_to}, lambda each: each.incidents())
        return Outcome(kubelet.states[ended], say(sidecars))

    def _process_files(self) -> set[str]:
        return {path.name for path in self.engine.recorder.glob("*.process")}


def is_seen(sidecar: PodSidecar) -> bool:
    report = sidecar.report()
    has_memory = sidecar.sees not in (BOTH, RECORDERS) or (report["ranks_reported"] and report["host"])
    return bool(report["engine"]["state"] == "ready" and has_memory)


def say(sidecars: Sidecars) -> dict[str, Said]:
    return {
        name: Said(
            incidents=each.incidents(), events=each.events(), text=each.text(), oom_kills=each.samples_with("oom_kill")
        )
        for name, each in sidecars.items()
    }


@contextmanager
def serving(
    environment: EngineEnvironment, folder: Path, limit_bytes: int, **options: object
) -> Iterator[tuple[Serving, Kubelet]]:
    """Start the engine in a pod, or skip with the reason why this machine runs none."""
    if reason := why_not(folder / "tried"):
        pytest.skip(reason)
    with Pod(folder / "pod") as pod:
        engine = PodEngine(environment, folder / "engine", **options)
        container = pod.container("vllm", limit_bytes=limit_bytes)
        made = Serving(pod, engine, container)
        probes = {"has_started": made.has_started, "is_alive": made.is_alive, "period_seconds": PROBE_SECONDS}
        with Kubelet(container, engine.command, env=engine.env, cwd=engine.folder, **probes) as kubelet:
            yield made, kubelet
