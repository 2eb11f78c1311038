"""A real engine under load in a pod, and what ends it: the kernel, at once and slowly, a probe, and an eviction.

One engine after the other in the same container, in the order of the tests, each with fresh sidecars: one has the
recorders' folder and the engine's log, two have one of them, and one has neither.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from highwater.terminal.demo.engine import EngineEnvironment
from tests.patience import wait_until
from tests.pod.engine import hog
from tests.pod.judging import acquits_memory, blames_host_memory, kinds, names_last_state
from tests.pod.kubelet import Kubelet
from tests.pod.serving import Outcome, Serving, say, serving
from tests.pod.sidecar import ALL, BOTH, LOG, NEITHER, RECORDERS, Sidecars, settle, sidecars_beside

MIB = 1024**2
LIMIT_BYTES = 3072 * MIB
TOO_MUCH_BYTES = 64 * MIB
SLOWLY_SECONDS = 45.0
LOOKS, LATE_LOOKS = 5, 24
WITH_RECORDERS = pytest.mark.parametrize("sees", [BOTH, RECORDERS])
EACH = pytest.mark.parametrize("sees", ALL)
WITH_LOG = pytest.mark.parametrize("sees", [BOTH, LOG])
UNCOUNTED = pytest.mark.parametrize("sees", [LOG, NEITHER])


@pytest.fixture(scope="module")
def running(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, Kubelet]]:
    with serving(engine_environment, tmp_path_factory.mktemp("serving"), LIMIT_BYTES) as both:
        yield both


def room_bytes(pod: Serving) -> int:
    return LIMIT_BYTES - pod.container.kept_bytes()


# --- killed by the kernel, at once and over 45 s ---


@pytest.fixture(scope="module")
def killed_at_once(running: tuple[Serving, Kubelet]) -> Outcome:
    """Another process of the container takes all that is left: the kernel ends the worker."""
    pod, kubelet = running
    with pod.watched() as sidecars:
        worker = pod.container.pid_of("VLLM::Worker")
        size = room_bytes(pod) + TOO_MUCH_BYTES
        return pod.wait_for_next(sidecars, lambda: hog(pod.container, size, victim=worker), kubelet)


@pytest.fixture(scope="module")
def killed_slowly(running: tuple[Serving, Kubelet]) -> Outcome:
    """EngineCore itself grows until the container is full."""
    pod, kubelet = running
    with pod.watched() as sidecars:
        size = room_bytes(pod) + TOO_MUCH_BYTES
        return pod.wait_for_next(sidecars, lambda: pod.engine.grow("EngineCore", size, SLOWLY_SECONDS), kubelet)


@pytest.fixture(scope="module", params=["at once", pytest.param("slowly", marks=pytest.mark.soak)])
def killed(request: pytest.FixtureRequest) -> Outcome:
    outcome: Outcome = request.getfixturevalue("killed_at_once" if request.param == "at once" else "killed_slowly")
    return outcome


def test_kubernetes_would_say_oom_killed(killed: Outcome) -> None:
    assert killed.state.reason == "OOMKilled"


@EACH
def test_a_kill_is_one_incident(killed: Outcome, sees: str) -> None:
    assert kinds(killed.by[sees].incidents) == ["died"]


@EACH
def test_a_kill_never_acquits_memory(killed: Outcome, sees: str) -> None:
    assert not acquits_memory(killed.by[sees].text), killed.by[sees].text


@UNCOUNTED
def test_a_kill_that_nobody_counted_is_not_known(killed: Outcome, sees: str) -> None:
    assert names_last_state(killed.by[sees].text), killed.by[sees].text


@WITH_RECORDERS
def test_a_kill_at_once_was_counted_by_the_kernel(killed_at_once: Outcome, sees: str) -> None:
    (incident,) = killed_at_once.by[sees].incidents
    assert "killed_by_kernel" in [each["name"] for each in incident["findings"]]
    assert blames_host_memory(incident)


@WITH_RECORDERS
def test_the_kernels_count_outlives_its_container(killed_at_once: Outcome, sees: str) -> None:
    assert killed_at_once.by[sees].oom_kills >= 1


@pytest.mark.soak
@WITH_RECORDERS
def test_a_slow_kill_names_the_kernel_and_the_process_that_grew(killed_slowly: Outcome, sees: str) -> None:
    said = killed_slowly.by[sees]
    assert blames_host_memory(said.incidents[0]), said.incidents[0]["findings"]
    assert any("EngineCore" in each["text"] for each in said.incidents[0]["findings"]), said.text


# --- a hang that the liveness probe ends ---


@pytest.fixture(scope="module")
def hang_ended(running: tuple[Serving, Kubelet]) -> Outcome:
    """EngineCore is stopped while it has nothing to do; then requests come through the sidecar that sees most.

    vLLM's counts stand still at zero. That sidecar says 503, and the kubelet acts.
    """
    pod, kubelet = running
    with pod.watched() as sidecars:
        return pod.wait_for_next(sidecars, lambda: stop_while_idle(pod), kubelet, known_to=(BOTH, RECORDERS))


def stop_while_idle(pod: Serving) -> None:
    assert pod.load is not None
    pod.load.may_ask.clear()
    wait_until(lambda: not any(pod.engine.requests_running() for _ in range(LOOKS)))
    os.kill(pod.container.pid_of("VLLM::EngineCore"), signal.SIGSTOP)
    pod.load.may_ask.set()


def test_the_probe_ended_the_hang(hang_ended: Outcome, running: tuple[Serving, Kubelet]) -> None:
    assert running[1].killed_by_probe == 1
    assert hang_ended.state.oom_kills == 0


@WITH_RECORDERS
def test_a_hang_that_was_ended_is_one_incident(hang_ended: Outcome, sees: str) -> None:
    assert len(hang_ended.by[sees].incidents) == 1, kinds(hang_ended.by[sees].incidents)


@WITH_RECORDERS
def test_a_silent_core_is_told_whoever_sees_the_requests(hang_ended: Outcome, sees: str) -> None:
    assert "EngineCore (pid" in hang_ended.by[sees].text
    assert "has written nothing for" in hang_ended.by[sees].text


def test_a_hang_says_that_it_was_ended_from_outside(hang_ended: Outcome) -> None:
    assert hang_ended.by[BOTH].incidents[0]["id"].endswith("hung")
    assert "outside" in hang_ended.by[BOTH].text, hang_ended.by[BOTH].text


@EACH
def test_a_hang_never_acquits_memory(hang_ended: Outcome, sees: str) -> None:
    assert not acquits_memory(hang_ended.by[sees].text), hang_ended.by[sees].text
    assert hang_ended.by[sees].oom_kills == 0


# --- an eviction; the last ---


@pytest.fixture(scope="module")
def evicted(running: tuple[Serving, Kubelet]) -> Outcome:
    """SIGTERM to process 1, and what is left after the grace is killed."""
    pod, kubelet = running
    with pod.watched() as sidecars:
        kubelet.evict()
        settle(sidecars, lambda each: each.report()["engine"]["state"] == "gone")
        settle(sidecars, lambda each: each.incidents(), looks=LATE_LOOKS)  # for all that time there must be none
        return Outcome(kubelet.states[-1], say(sidecars))


@WITH_LOG
def test_an_eviction_is_an_event_and_no_incident(evicted: Outcome, sees: str) -> None:
    assert evicted.by[sees].incidents == []
    assert [each for each in evicted.by[sees].events if "the engine ended in order" in each["summary"]]


@EACH
def test_an_eviction_never_acquits_memory(evicted: Outcome, sees: str) -> None:
    assert not acquits_memory(evicted.by[sees].text), evicted.by[sees].text


# --- sidecars that begin beside the engine that ended ---


@pytest.fixture(scope="module")
def late(evicted: Outcome, running: tuple[Serving, Kubelet]) -> Iterator[Sidecars]:
    """Its processes have numbers of another namespace: their files, which fall silent, are all that shows their end."""
    assert evicted.state
    pod, _ = running
    with sidecars_beside(pod.pod, pod.engine.url, pod.engine.recorder, pod.container.log_path) as sidecars:
        with_files = {sees: sidecars[sees] for sees in (BOTH, RECORDERS)}
        settle(with_files, lambda each: each.report()["engine"]["state"] == "gone")
        yield sidecars


@WITH_RECORDERS
def test_a_sidecar_that_begins_beside_a_dead_engine_says_so(late: Sidecars, sees: str) -> None:
    report = late[sees].report()
    assert (report["engine"]["state"], late[sees].health(), late[sees].incidents()) == ("gone", 503, [])
    assert report["engine"]["since"] < report["sidecar_started_at"]


def test_a_sidecar_that_sees_no_file_does_not_know_that_there_was_an_engine(late: Sidecars) -> None:
    assert (late[NEITHER].report()["engine"]["state"], late[NEITHER].health()) == ("starting", 200)
