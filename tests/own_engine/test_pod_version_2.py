"""A real engine under load that is killed whole, as with `memory.oom.group`, in a control group of version 2.

Its files are written by the tests after the kernel's documentation (`tests/pod/version_2.py`): no kernel of version 2
has seen these tests. The kill itself is the kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from highwater.demo.environment import EngineEnvironment
from tests.pod.engine import hog
from tests.pod.judging import acquits_memory, blames_host_memory, kinds, names_last_state
from tests.pod.serving import Outcome, serving
from tests.pod.sidecar import BOTH, LOG, NEITHER, RECORDERS

pytestmark = pytest.mark.soak

MIB = 1024**2
LIMIT_BYTES = 3072 * MIB
TOO_MUCH_BYTES = 64 * MIB
HOG_SECONDS = 10.0
"""Longer than the sidecars need to see it: nothing is written after the kill."""
EACH = pytest.mark.parametrize("sees", [BOTH, RECORDERS, LOG, NEITHER])


@pytest.fixture(scope="module")
def killed_whole(engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = tmp_path_factory.mktemp("version-2")
    with (
        serving(engine_environment, folder, LIMIT_BYTES, is_version_2=True) as (pod, kubelet),
        pod.watched() as sidecars,
    ):
        worker = pod.container.pid_of("VLLM::Worker")
        size = LIMIT_BYTES - pod.container.kept_bytes() + TOO_MUCH_BYTES
        yield pod.wait_for_next(sidecars, lambda: hog(pod.container, size, victim=worker, seconds=HOG_SECONDS), kubelet)


@EACH
def test_a_whole_kill_is_one_incident_version_2_written_by_hand(killed_whole: Outcome, sees: str) -> None:
    assert (killed_whole.state.reason, killed_whole.state.exit_code) == ("OOMKilled", 137)
    assert kinds(killed_whole.by[sees].incidents) == ["died"]


@pytest.mark.parametrize("sees", [BOTH, RECORDERS])
def test_a_whole_kill_was_at_the_limit_version_2_written_by_hand(killed_whole: Outcome, sees: str) -> None:
    (incident,) = killed_whole.by[sees].incidents
    assert blames_host_memory(incident), incident["findings"]


@EACH
def test_a_whole_kill_never_acquits_memory_version_2_written_by_hand(killed_whole: Outcome, sees: str) -> None:
    text = killed_whole.by[sees].text
    assert not acquits_memory(text), text
    assert names_last_state(text), text
