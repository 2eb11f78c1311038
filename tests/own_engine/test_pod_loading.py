"""A container that the kernel kills for memory while vLLM loads, three times, in a pod with sidecars.

Four sidecars watch the same engine: one has the recorders' folder and the engine's log, two have one of them, and one
has neither. vLLM is process 1 of its container, so with it everything ends, and nobody is left who could count the
kill: what the process file says is that the container stood at its limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from highwater.terminal.demo.engine import EngineEnvironment
from highwater.watch.starts import PREFIX
from tests.pod.engine import PodEngine
from tests.pod.judging import acquits_memory, blames_host_memory, names_last_state
from tests.pod.kubelet import Kubelet
from tests.pod.pod import Pod, why_not
from tests.pod.sidecar import ALL, BOTH, LOG, NEITHER, RECORDERS, Sidecars, settle, sidecars_beside

MIB = 1024**2
# vLLM has imported itself and writes its process file; EngineCore is not there yet.
LIMIT_BYTES = 800 * MIB
# It has logged its version, and written no file yet.
EARLY_LIMIT_BYTES = 450 * MIB
STARTS = 3


class Loop(NamedTuple):
    kubelet: Kubelet
    sidecars: Sidecars


@contextmanager
def crash_loop(environment: EngineEnvironment, folder: Path, limit_bytes: int) -> Iterator[Loop]:
    """Start the engine three times, in a container that is too small for it."""
    if reason := why_not(folder / "tried"):
        pytest.skip(reason)
    with Pod(folder / "pod") as pod:
        engine = PodEngine(environment, folder / "engine")
        container = pod.container("vllm", limit_bytes=limit_bytes)
        with (
            sidecars_beside(pod, engine.url, engine.recorder, container.log_path) as sidecars,
            Kubelet(container, engine.command, env=engine.env, cwd=engine.folder, starts=STARTS) as kubelet,
        ):
            kubelet.wait_for_ends(STARTS)
            with_some = {sees: sidecars[sees] for sees in (BOTH, RECORDERS, LOG)}
            # By the log alone the last start ends when the next one begins, and there is none.
            ends = {BOTH: STARTS, RECORDERS: STARTS, LOG: STARTS - 1}
            settle(with_some, lambda each: sum(one["count"] for one in each.incidents()) >= ends[each.sees])
            yield Loop(kubelet, sidecars)


@pytest.fixture(scope="module")
def loop(engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with crash_loop(engine_environment, tmp_path_factory.mktemp("loading"), LIMIT_BYTES) as after:
        yield after


def test_the_kernel_killed_it_each_time(loop: Loop) -> None:
    """The harness itself: `lastState` would say OOMKilled, with exit code 137."""
    assert [each.reason for each in loop.kubelet.states] == ["OOMKilled"] * STARTS
    assert {each.exit_code for each in loop.kubelet.states} == {137}


@pytest.mark.parametrize("sees", [BOTH, RECORDERS, LOG])
def test_the_first_failed_start_is_an_incident(loop: Loop, sees: str) -> None:
    (incident,) = loop.sidecars[sees].incidents()
    assert incident["kind"] == "start_failed"
    assert incident["at"] < loop.kubelet.ended_at[-1]


@pytest.mark.parametrize("sees", [BOTH, RECORDERS, LOG])
def test_a_crash_loop_is_one_incident_with_a_count(loop: Loop, sees: str) -> None:
    (incident,) = loop.sidecars[sees].incidents()
    assert incident["kind"] == "start_failed"
    # The end of the last start is seen for certain when the next one has come as far as the log or a file.
    assert incident["count"] in {STARTS - 1, STARTS}


@pytest.mark.parametrize("sees", [BOTH, RECORDERS])
def test_it_says_that_memory_was_at_the_containers_limit(loop: Loop, sees: str) -> None:
    (incident,) = loop.sidecars[sees].incidents()
    assert blames_host_memory(incident), incident["findings"]
    text = loop.sidecars[sees].text()
    assert "API server" in text
    assert "800" in text


@pytest.mark.parametrize("sees", [BOTH, RECORDERS, LOG])
def test_the_last_state_is_named_for_what_nobody_counted(loop: Loop, sees: str) -> None:
    said = loop.sidecars[sees].text()
    assert not acquits_memory(said), said
    assert names_last_state(said), said


def test_who_sees_neither_says_nothing_false(loop: Loop) -> None:
    """It knows of no engine yet: no incident, and what would show more."""
    sidecar = loop.sidecars[NEITHER]
    said = sidecar.command("status")
    assert sidecar.incidents() == []
    assert not acquits_memory(said)
    assert "recorder_dir" in said or names_last_state(said), said


@pytest.mark.parametrize("sees", [BOTH, RECORDERS, LOG])
def test_restarts_are_counted_and_events(loop: Loop, sees: str) -> None:
    sidecar = loop.sidecars[sees]
    assert STARTS - 1 <= sidecar.metric("highwater_engine_restarts_total") <= STARTS
    assert sidecar.metric("highwater_incidents_total", kind="start_failed") >= 1
    failed = [each for each in sidecar.events() if each["summary"].startswith(PREFIX)]
    assert len(failed) >= STARTS - 1


@pytest.mark.parametrize("sees", [BOTH, RECORDERS, LOG])
def test_status_names_the_failed_start(loop: Loop, sees: str) -> None:
    said = loop.sidecars[sees].command("status")
    assert "engine_url right" not in said
    assert re.search(r"The\s+engine(\s+did\s+not\s+start|'s\s+last\s+(start|\d+\s+starts)\s)", said), said


# --- before vLLM has written a file ---


@pytest.fixture(scope="module")
def early_loop(engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with crash_loop(engine_environment, tmp_path_factory.mktemp("early"), EARLY_LIMIT_BYTES) as after:
        yield after


@pytest.mark.soak
@pytest.mark.parametrize("sees", [BOTH, LOG])
def test_a_start_that_ends_before_any_file_is_in_the_log(early_loop: Loop, sees: str) -> None:
    (incident,) = early_loop.sidecars[sees].incidents()
    assert incident["kind"] == "start_failed"
    assert names_last_state(early_loop.sidecars[sees].text())


@pytest.mark.soak
@pytest.mark.parametrize("sees", ALL)
def test_a_start_that_ends_before_any_file_acquits_nothing(early_loop: Loop, sees: str) -> None:
    said = f"{early_loop.sidecars[sees].text()}\n{early_loop.sidecars[sees].command('status')}"
    assert not acquits_memory(said), said
