"""An EngineCore that is stopped where its PID namespace is not seen: its process file alone grows old."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from highwater.host.process_lives import SilentCores
from highwater.host.reading import EndedProcess, HostReading, ProcessMemory
from highwater.watch.recorder.progress import SilentCore
from tests.unit.host.test_past import Pod

STARTED = {"api_server": 100, "engine_core": 200, "worker": 300}


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


async def write_on(pod: Pod, seconds: int, *roles: str, **changes: object) -> SilentCore | None:
    """These processes write once a second; return what is known of a silent EngineCore then."""
    for _ in range(seconds):
        pod.now += 1.0
        for role in roles:
            pod.write(role, 400, kept=1600, **({"started": STARTED[role]} | changes))
        if pod.now % 5.0 == 0:
            await pod.watch.read()
    await pod.watch.read()
    return pod.watch.silent_core()


async def test_one_that_writes_nothing_while_its_api_server_does_is_silent(pod):
    assert await write_on(pod, 30, *STARTED) is None
    assert await write_on(pod, 20, "api_server", "worker") is None
    assert await write_on(pod, 20, "api_server", "worker") == SilentCore("EngineCore (pid 2)", 40.0, has_workers=True)
    assert await write_on(pod, 2, *STARTED) is None


async def test_it_stays_silent_though_its_file_was_swept(pod):
    await write_on(pod, 5, *STARTED)
    silent = await write_on(pod, 700, "api_server")
    assert (silent.seconds, silent.has_workers) == (700.0, False)


@pytest.mark.parametrize("roles", [(), ("worker",)])
async def test_an_engine_that_has_ended_is_not_silent(pod, roles):
    await write_on(pod, 10, *STARTED)
    assert await write_on(pod, 60, *roles) is None


async def test_the_core_of_the_life_before_is_not_silent(pod):
    await write_on(pod, 10, *STARTED)
    assert await write_on(pod, 60, "api_server", started=900) is None


async def test_one_whose_file_was_removed_ended_in_order(pod):
    await write_on(pod, 10, *STARTED)
    for path in pod.folder.glob("highwater-2-*"):
        path.unlink()
    assert await write_on(pod, 60, "api_server") is None


def test_it_is_asked_on_another_thread_than_it_looks():
    watch = SilentCores()
    server = ProcessMemory(role="api_server", name="API server", pid=1, started=1)
    core = EndedProcess(role="engine_core", name="EngineCore", pid=2, started=2, age_seconds=60.0)
    watch.look(HostReading(taken_at=20.0, processes=(server,), ended=(core,)))
    iterated, before = iter(watch._silent.values()), next(iter(watch._silent))
    watch.look(HostReading(taken_at=20.0, processes=(server,), ended=(core, replace(core, pid=3))))
    assert [one.pid for one, _ in iterated] == [before.pid]
    assert len(watch._silent) == 2
