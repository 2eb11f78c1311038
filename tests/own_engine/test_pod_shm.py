"""`/dev/shm` of a pod with a real engine that is killed and starts again: the volume outlives its container.

The sidecar sees no process of the engine's container; who has which file open is the engine's to tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from highwater.demo.environment import EngineEnvironment
from highwater.host.reader import HostReader
from highwater.host.reading import ShmMemory, ShmOwner
from highwater.host.report import report_of
from highwater.units import MIB
from tests.patience import wait_until
from tests.pod.kubelet import Kubelet, wait_for_start
from tests.pod.serving import Serving, serving

pytestmark = pytest.mark.long("recorder")

LIMIT_BYTES = 4096 * MIB
REGION_BYTES = 256 * MIB
# As vLLM 0.32 does with its offloaded KV cache: the file has no name any more once it is mapped.
UNLINKED = """
import mmap, os, sys, time
path = "/dev/shm/vllm_offload_test.mmap"
file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
os.ftruncate(file, int(sys.argv[1]))
region = mmap.mmap(file, int(sys.argv[1]))
os.close(file)
for place in range(0, int(sys.argv[1]) // 2, 4096):
    region[place] = 1
os.unlink(path)
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
    """The first look at `/dev/shm` of which that holds."""

    def look() -> ShmMemory | None:
        shm = reader.read().shm
        return shm if shm is not None and holds(shm) else None

    with suppress(TimeoutError):
        wait_until(look, pause_seconds=0.5)
    found = look()
    assert found is not None, reader.read().shm
    return found


def test_a_region_without_a_name_is_the_owners_that_have_it_mapped(running: tuple[Serving, Kubelet]) -> None:
    pod, _ = running
    pod.container.run([sys.executable, "-I", "-S", "-c", UNLINKED, str(REGION_BYTES)])
    shm = shm_with(HostReader(pod.engine.recorder), lambda each: "kv_offload" in rows(each, "unlinked"))
    region = rows(shm, "unlinked")["kv_offload"]
    assert region.files == 1
    assert region.used_bytes == pytest.approx(REGION_BYTES // 2, abs=MIB)
    assert region.promised_bytes == pytest.approx(REGION_BYTES // 2, abs=MIB)
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
    names = [one.name for one in report_of(reader.read()).findings]
    assert "shm_promised_too_much" not in names
    assert "shm_left_over" in names
