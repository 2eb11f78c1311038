"""`/dev/shm` of a pod with a real engine that is killed and starts again: the volume outlives its container.

The sidecar sees no process of the engine's container; who has which file open is the engine's to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from highwater.diagnose.rules.book import host_findings
from highwater.host.reading import ShmMemory, ShmOwner
from highwater.host.report import report_of
from highwater.host.watch import HostReader
from highwater.model.units import MIB
from highwater.terminal.demo.engine import EngineEnvironment
from tests.patience import wait_until
from tests.pod.kubelet import Kubelet, wait_for_start
from tests.pod.serving import Serving, serving

pytestmark = pytest.mark.soak

LIMIT_BYTES = 4096 * MIB
REGION_BYTES = 256 * MIB
# vLLM's own, which its offloading connector makes on devices alone: not on CPU.
OFFLOADING = """
import sys, time
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
region = SharedOffloadRegion("test", 1, None, int(sys.argv[1]), 0, barrier=lambda: None)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def running(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, Kubelet]]:
    with serving(engine_environment, tmp_path_factory.mktemp("shm"), LIMIT_BYTES) as both:
        wait_for_start(both[0].has_started)
        yield both


def rows(shm: ShmMemory, state: str) -> dict[str, ShmOwner]:
    return {one.owner: one for one in shm.owners if one.state == state}


def shm_with(reader: HostReader, holds: Callable[[ShmMemory], object]) -> ShmMemory:
    def look() -> ShmMemory | None:
        shm = reader.read().shm
        return shm if shm is not None and holds(shm) else None

    with suppress(TimeoutError):
        wait_until(look, pause_seconds=0.5)
    found = look()
    assert found is not None, reader.read().shm
    return found


def test_the_region_of_an_offloaded_cache_has_an_owner_though_it_has_no_name(
    running: tuple[Serving, Kubelet], engine_environment: EngineEnvironment
) -> None:
    pod, _ = running
    pod.container.run([str(engine_environment.python), "-c", OFFLOADING, str(REGION_BYTES)])
    shm = shm_with(HostReader(pod.engine.recorder), lambda each: "kv_offload" in rows(each, "unlinked"))
    region = rows(shm, "unlinked")["kv_offload"]
    assert (region.files, region.used_bytes) == (1, pytest.approx(REGION_BYTES, abs=MIB))
    assert sum(one.used_bytes for one in shm.owners) == pytest.approx(shm.used_bytes, abs=MIB)
    assert rows(shm, "in_use")["rpc_rings"].promised_bytes > 0


def test_what_killed_lives_left_is_in_nobodys_use_and_warns_of_no_bus_error(running: tuple[Serving, Kubelet]) -> None:
    pod, kubelet = running
    for _ in range(2):
        ended = len(kubelet.states)
        pod.container.kill()
        kubelet.wait_for_ends(ended + 1)
        wait_for_start(lambda ended=ended: pod.container.starts > ended + 1 and pod.has_started())
    reader, folder = HostReader(pod.engine.recorder), Path(f"/proc/{pod.pod.sandbox}/root/dev/shm")
    rings = sum(path.name.startswith("psm_") for path in folder.iterdir())
    # The last look may be of a time before the last ring was made.
    shm = shm_with(reader, lambda each: sum(one.files for one in each.owners if one.owner == "rpc_rings") == rings)
    assert rows(shm, "left_over")["rpc_rings"].files == 2 * rows(shm, "in_use")["rpc_rings"].files
    assert sum(one.promised_bytes for one in shm.owners) > (shm.free_bytes or 0), "as a whole they would not fit"
    names = [one.name for one in report_of(reader.read(), judge=host_findings).findings]
    assert "shm_promised_too_much" not in names
    assert "shm_left_over" in names
