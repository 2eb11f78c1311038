"""Which processes are one life of the engine by their files, whether it runs, and how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.host.process_lives import ProcessLives
from highwater.host.reading import ContainerMemory, EndedProcess, HostReading, ProcessMemory
from highwater.model.engine import EndedLife, ProcessLife

MIB = 1 << 20
LIMIT = 1250 * MIB


def runs(role: Any, pid: int, started: int, parent: int | None = None, **more: Any) -> ProcessMemory:
    return ProcessMemory(role=role, name=more.pop("name", role), pid=pid, started=started, parent_pid=parent, **more)


def ended(
    role: Any, pid: int, started: int, *, parent: int | None = None, used: int = 0, kills: int = 0, **more: Any
) -> EndedProcess:
    container = ContainerMemory(
        key=more.pop("container", "c1"),
        used_bytes=used,
        kept_bytes=used,
        limit_bytes=more.pop("limit", LIMIT),
        events={"oom_kill": kills},
    )
    known = {"name": role, "age_seconds": 20.0, "container": container.key} | more
    return EndedProcess(role=role, pid=pid, started=started, parent_pid=parent, last_container=container, **known)


def lives(*processes: ProcessMemory, watch: ProcessLives | None = None, **reading: Any) -> tuple[ProcessLife, ...]:
    watch = watch or ProcessLives()
    dead = tuple(one for one in processes if isinstance(one, EndedProcess))
    living = tuple(one for one in processes if not isinstance(one, EndedProcess))
    watch.look(HostReading(taken_at=1000.0, processes=living, ended=dead, **reading))
    assert watch.last[0] == 1000.0
    return watch.last[1]


def pids(seen: tuple[ProcessLife, ...]) -> list[set[int | None]]:
    return [{process.pid for process in life.processes} for life in seen]


LAYOUTS = {
    "one API server": [("api_server", 7, 100, 1), ("engine_core", 8, 200, 7), ("worker", 9, 300, 8)],
    "parents that are not known": [("api_server", 7, 100, 1), ("engine_core", 8, 100, 1), ("worker", 9, 100, 1)],
    "no API server's file": [("engine_core", 8, 200, 7), ("worker", 9, 300, 8)],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_processes_of_a_start_are_one_life(layout):
    assert pids(lives(*(runs(*each) for each in layout))) == [{pid for _, pid, _, _ in layout}]


def test_what_a_killed_api_server_leaves_loads_nothing():
    """EngineCore and its workers run on for seconds, or for ever; a launcher that lives starts another."""
    left = [runs("engine_core", 8, 200, 7), runs("worker", 9, 300, 8)]
    (life,) = lives(ended("api_server", 7, 100, age_seconds=2.0), *left)
    assert (life.is_running, life.has_server, life.is_serving) == (False, True, False)
    (life,) = lives(runs("launcher", 5, 50), ended("api_server", 7, 100, parent=5, age_seconds=2.0), *left)
    assert life.is_running


def test_several_api_servers_and_data_parallel_engines_are_one_life():
    for first in ("launcher", "api_server"):
        processes = [runs(first, 1, 100, 0)]
        processes += [runs("api_server", 10 + n, 200, 1, name=f"API server {n}") for n in range(2)]
        processes += [runs("engine_core", 20 + n, 201, 1, name=f"EngineCore {n}") for n in range(2)]
        processes += [runs("worker", 30 + n, 300, 20 + n, rank=0, dp_rank=n) for n in range(2)]
        assert len(lives(*processes)) == 1


def test_a_worker_that_was_restarted_alone_is_of_the_same_life():
    dead = ended("worker", 9, 300, parent=8, rank=0)
    alive = [runs("api_server", 7, 100, 1), runs("engine_core", 8, 200, 7), runs("worker", 12, 900, 8, rank=0)]
    (life,) = lives(dead, *alive)
    assert (life.is_running, len(life.processes)) == (True, 4)


@pytest.mark.parametrize("parent", [0, 1, 4711])
def test_a_process_1_with_another_start_is_another_life(parent):
    first = [ended("api_server", 1, 100, parent=parent), ended("engine_core", 60, 200, parent=1)]
    second = [runs("api_server", 1, 900, parent, container="c1"), runs("engine_core", 60, 950, 1, container="c1")]
    old, new = lives(*second, *first)
    assert (old.is_running, new.is_running) == (False, True)
    assert {process.pid_started for process in new.processes} == {900, 950}


@pytest.mark.parametrize("again", [(), (ended("engine_core", 70, 600, run_seconds=5.0, age_seconds=8.0),)])
def test_a_process_that_began_after_a_lifes_last_sign_is_another_lifes(again):
    """Its API server removed its own file, and left EngineCore's; the hostname stays, and so may a parent's number."""
    core = ended("engine_core", 60, 200, parent=1, run_seconds=30.0)
    server = runs("api_server", 9, 500, run_seconds=12.0)
    assert pids(lives(core, server, *again)) == [{60}, {9} | {one.pid for one in again}]
    assert pids(lives(core, runs("api_server", 1, 500))) == [{60}, {1}]
    heir = runs("worker", 90, 500, 60, container="c1", run_seconds=12.0)
    assert pids(lives(core, heir)) == [{60}, {90}]


def test_a_process_that_began_before_the_others_ended_is_of_their_life():
    server = ended("api_server", 7, 100, run_seconds=60.0)
    assert pids(lives(server, runs("engine_core", 8, 200, run_seconds=70.0))) == [{7, 8}]
    busy = runs("api_server", 7, 100, age_seconds=1.2, run_seconds=60.0)
    assert pids(lives(busy, runs("engine_core", 8, 200, run_seconds=0.1))) == [{7, 8}]


def test_another_pods_engine_is_another_life():
    assert len(lives(runs("api_server", 1, 100, host="a"), runs("engine_core", 5, 200, host="b"))) == 2


def test_in_a_pod_only_the_processes_of_the_pod_count():
    """The folder may be a node's; also while the pod's own engine is not there for once."""
    watch = ProcessLives(host="pod-a")
    other, own = runs("api_server", 1, 100, host="pod-b"), runs("api_server", 1, 200, host="pod-a")
    assert [len(lives(other, watch=watch)), len(lives(other, own, watch=watch)), len(lives(other, watch=watch))] == [
        1,
        1,
        0,
    ]


def test_a_process_that_only_loaded_the_package_is_none():
    """`vllm bench`, a shell in the container; process 1 of a container counts whatever its command line says."""
    assert (
        lives(runs("other", 55, 100), runs("resource_tracker", 56, 100), runs("api_server", 9, 1, source="proc")) == ()
    )
    assert pids(lives(runs("other", 1, 100))) == [{1}]


def test_one_that_is_stopped_has_not_ended():
    server = runs("api_server", 7, 100)
    for exists in (True, False):
        watch = ProcessLives(lambda _, exists=exists: exists)
        lives(server, watch=watch)
        for _ in range(3):
            assert [life.is_running for life in lives(watch=watch)] == [True] * exists


def test_a_kill_by_the_kernel_is_told_with_every_process_and_the_limit():
    dead = [
        ended("api_server", 7, 100, kills=1, used=LIMIT, name="API server", peak_bytes=672 * MIB),
        ended("worker", 9, 300, kills=0, used=LIMIT // 2, age_seconds=25.0),
    ]
    (life,) = lives(*dead)
    assert life.end == EndedLife(
        how="was killed by the kernel for memory",
        memory="1.22 GiB of 1.22 GiB",
        processes="API server 672 MiB at its peak, worker",
        oom_kills=1,
    )
    assert (life.last_at, life.is_running, life.has_server, life.is_serving) == (980.0, False, True, False)


@pytest.mark.parametrize(("used", "limit", "words"), [(0.97, LIMIT, True), (0.5, LIMIT, False), (0.97, None, False)])
def test_a_container_that_was_nearly_full_was_probably_killed_at_once(used, limit, words):
    (life,) = lives(ended("api_server", 1, 100, used=int(used * LIMIT), limit=limit))
    assert life.end.how.startswith("ended without a word")
    assert ("probably killed by the kernel" in life.end.how, life.end.oom_kills) == (words, 0)


def test_a_kill_of_an_earlier_life_in_the_same_group_is_not_told_again():
    first, second = ended("api_server", 7, 100, kills=3), ended("api_server", 8, 900, kills=3)
    assert [life.end.oom_kills for life in lives(second, first)] == [3, 0]


@pytest.mark.parametrize(("is_private", "kills"), [(False, 1), (True, 3)])
def test_a_count_from_before_the_engine_is_not_told(is_private, kills):
    """On a bare machine its group may be old; a container with a PID namespace of its own began with it."""
    watch = ProcessLives()
    container = ContainerMemory(key="c1", events={"oom_kill": 2}, is_private=is_private)
    lives(runs("api_server", 7, 100, container="c1"), watch=watch, container=container)
    assert [life.end.oom_kills for life in lives(ended("api_server", 7, 100, kills=3), watch=watch)] == [kills]


def test_the_containers_that_are_remembered_are_bounded():
    watch = ProcessLives()
    for number in range(600):
        containers = tuple(ContainerMemory(key=key, events={"oom_kill": 7}) for key in ("own", f"c{number}"))
        processes = [runs("worker", at + 2, 1, container=one.key) for at, one in enumerate(containers)]
        lives(*processes, watch=watch, other_containers=containers)
    assert len(watch._kills) == 256
    assert watch._kills["own"] == 7
