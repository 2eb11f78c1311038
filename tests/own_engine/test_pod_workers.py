"""A real engine of two workers under load in a pod: the kernel kills one of them, and the others count it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from highwater.terminal.demo.engine import EngineEnvironment
from tests.pod.engine import hog
from tests.pod.judging import acquits_memory, blames_host_memory, kinds, names_last_state
from tests.pod.serving import Outcome, serving
from tests.pod.sidecar import ALL, BOTH, LOG, NEITHER, RECORDERS

pytestmark = pytest.mark.soak

MIB = 1024**2
LIMIT_BYTES = 4096 * MIB
TOO_MUCH_BYTES = 64 * MIB
EACH = pytest.mark.parametrize("sees", ALL)


@pytest.fixture(scope="module")
def one_killed(engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = tmp_path_factory.mktemp("workers")
    with (
        serving(engine_environment, folder, LIMIT_BYTES, tensor_parallel=2) as (pod, kubelet),
        pod.watched() as sidecars,
    ):
        worker = pod.container.pid_of("VLLM::Worker_TP1")
        size = LIMIT_BYTES - pod.container.kept_bytes() + TOO_MUCH_BYTES
        yield pod.wait_for_next(sidecars, lambda: hog(pod.container, size, victim=worker), kubelet)


@EACH
def test_one_worker_killed_is_one_incident(one_killed: Outcome, sees: str) -> None:
    assert one_killed.state.reason == "OOMKilled"
    assert kinds(one_killed.by[sees].incidents) == ["died"]


@pytest.mark.parametrize("sees", [BOTH, RECORDERS])
def test_the_other_processes_counted_the_kill(one_killed: Outcome, sees: str) -> None:
    (incident,) = one_killed.by[sees].incidents
    assert "killed_by_kernel" in [each["name"] for each in incident["findings"]]
    assert blames_host_memory(incident)


@EACH
def test_one_worker_killed_never_acquits_memory(one_killed: Outcome, sees: str) -> None:
    assert not acquits_memory(one_killed.by[sees].text), one_killed.by[sees].text


@pytest.mark.parametrize("sees", [LOG, NEITHER])
def test_one_worker_killed_that_nobody_counted_is_not_known(one_killed: Outcome, sees: str) -> None:
    assert names_last_state(one_killed.by[sees].text), one_killed.by[sees].text
