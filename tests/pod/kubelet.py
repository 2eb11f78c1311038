"""As much of a kubelet as the situations need: it restarts a container, probes it, and evicts it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.patience import wait_until
from tests.pod.pod import Container, Ended

LOOK_SECONDS = 0.1
BACK_OFF_SECONDS = 2.0
"""Before the second restart, and twice as long before each further one; the first comes at once. Kubernetes has 10."""
PERIOD_SECONDS = 2.0
FAILURES = 3
START_LIMITS = 10


def wait_for_start(condition: Callable[[], object]) -> None:
    """Wait until a condition holds that a start of vLLM decides: on a busy machine for several of the usual limits."""
    for attempt in range(START_LIMITS):
        try:
            return wait_until(condition, pause_seconds=LOOK_SECONDS)
        except TimeoutError:
            if attempt == START_LIMITS - 1:
                raise
    return None


class Kubelet:
    """Keeps one container running, from the first start to an eviction; a context manager.

    Args:
        container: The engine's.
        command: Its process 1.
        env: Its environment.
        cwd: Its working directory.
        has_started: The startup probe.
        is_alive: The liveness probe, asked once the container has started: it is ended when that failed thrice running.
        period_seconds: Of both probes.
        starts: How often it is started, as if the back-off were minutes then; None: without a limit.
    """

    def __init__(
        self,
        container: Container,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        has_started: Callable[[], bool] = lambda: False,
        is_alive: Callable[[], bool] = lambda: True,
        period_seconds: float = PERIOD_SECONDS,
        starts: int | None = None,
    ) -> None:
        self.container = container
        self.states: list[Ended] = []
        """What it would show as `lastState`, one after the other."""
        self.ended_at: list[float] = []
        """When, in Unix seconds."""
        self.killed_by_probe = 0
        self._start = lambda: container.start(command, env=env, cwd=cwd)
        self._has_started, self._is_alive = has_started, is_alive
        self._period_seconds, self._starts = period_seconds, starts
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Self:
        self._start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.evict()

    def evict(self) -> None:
        """End it for good: SIGTERM, a grace, SIGKILL; a second call does nothing."""
        self._is_done.set()
        self._thread.join()
        if self.container.is_running():
            self._end()

    def wait_for_ends(self, number: int) -> None:
        wait_for_start(lambda: len(self.states) >= number)

    def _run(self) -> None:
        while not self._is_done.is_set():
            self._watch_life()
            if len(self.states) == self._starts:
                return
            if not self._is_done.wait(self._back_off()):
                self._start()

    def _watch_life(self) -> None:
        has_started, failures, asked_at = False, 0, time.monotonic()
        while not self._is_done.wait(LOOK_SECONDS):
            if not self.container.is_running():
                self._note_end()
                return
            if time.monotonic() - asked_at > self._period_seconds:
                has_started = has_started or self._has_started()
                failures = failures + 1 if has_started and not self._is_alive() else 0
                asked_at = time.monotonic()
            if failures == FAILURES:
                self.killed_by_probe += 1
                self._end()
                return

    def _end(self) -> None:
        self.container.stop()
        self._note_end()

    def _note_end(self) -> None:
        self.ended_at.append(time.time())
        self.states.append(self.container.ended())

    def _back_off(self) -> float:
        ended = len(self.states)
        return 0.0 if ended < 2 else BACK_OFF_SECONDS * 2.0 ** (ended - 2)
