"""Kills for memory: of the engine's own control groups alone, reported while they are recent, and kept as a total."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.host.past import OomKillWatch
from highwater.host.reading import ContainerMemory, EndedProcess, HostReading, ProcessMemory
from highwater.host.report import OomKills
from highwater.process.clocks import Clocks
from tests.fakes.engine import FakeClock
from tests.fakes.incident import reading

BY_CONTAINER = "counted in the engine's container"


def rank(number: int, kills: int | None):
    known = reading(number)
    return replace(known, host_memory=replace(known.host_memory, cgroup_oom_kills=kills))


def container(kills: int | None, key: str = "engine", version: int = 2, **changes) -> ContainerMemory:
    """A quarter full; version 2 counts more, which is no kill of its own."""
    events = {} if kills is None else {"oom_kill": kills} | ({"oom": 1, "oom_group_kill": 1} if version == 2 else {})
    given = {"limit_bytes": 1000, "kept_bytes": 250, "is_private": True} | changes
    return ContainerMemory(key=key, version=version, events=events, **given)


def process(key: str = "engine", age: float = 0.5) -> ProcessMemory:
    return ProcessMemory(role="api_server", name="API server", pid=1, container=key, age_seconds=age)


def seen(kills: int | None, *, key: str = "engine", process_age: float = 0.5, **changes) -> HostReading:
    """An engine that runs in a container of that key."""
    here = container(kills, key, **changes)
    return HostReading(taken_at=1.0, processes=(process(key, process_age),), container=here)


def left(kills: int | None, *, key: str = "engine", age: float = 4.0, **changes) -> HostReading:
    """What a process that has ended has left."""
    last = container(kills, key, age_seconds=age, **changes)
    dead = EndedProcess(role="worker", name="w", pid=3, container=key, age_seconds=age, last_container=last)
    return HostReading(taken_at=1.0, ended=(dead,))


@pytest.mark.parametrize("version", [1, 2])
def test_a_rise_between_two_looks_is_told_for_a_minute(version):
    clock = FakeClock()
    watch = OomKillWatch(Clocks(clock))
    assert (watch.recent(), watch.total) == (None, None)
    watch.look(seen(7, version=version))
    assert (watch.recent(), watch.total) == (None, 0)
    watch.look(seen(8, version=version))
    for seconds in (0.0, 59.0):
        clock.advance(seconds)
        assert watch.recent() == OomKills(count=1, where=BY_CONTAINER)
    clock.advance(2.0)
    assert (watch.recent(), watch.total) == (None, 1)


def test_the_next_life_adds_to_the_total():
    """Its container counts from 0, also where a kill was counted before its first look."""
    watch = OomKillWatch(Clocks(FakeClock()))
    for kills, key in ((0, "first"), (1, "first"), (0, "second"), (2, "second"), (1, "third")):
        watch.look(seen(kills, key=key))
    assert watch.total == 4


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, None),
        ({"kept_bytes": 990}, 1),
        ({"is_private": False}, None),
        ({"is_private": False, "kept_bytes": 990}, 1),
        ({"is_private": False, "kept_bytes": 990, "version": 1}, 1),
        ({"kills": 0}, None),
        ({"kills": None}, None),
    ],
)
def test_the_dead_of_a_container_have_left_its_count(changes, count):
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.look(left(**{"kills": 1} | changes))
    recent = watch.recent()
    assert (None if recent is None else recent.count) == count


def test_an_old_count_on_a_bare_machine_is_no_kill_and_its_rise_is():
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.look(seen(5, is_private=False, sees="sidecar"))
    watch.look(left(5, is_private=False))
    assert watch.recent(left(5, is_private=False)) is None
    watch.look(left(6, is_private=False))
    assert watch.recent().count == 1


def test_the_sidecars_own_group_says_nothing_of_another_container():
    watch = OomKillWatch(Clocks(FakeClock()))
    for kills in (0, 1):
        own = container(kills, "sidecar", sees="sidecar")
        watch.look(replace(seen(0), other_containers=(own,)))
    assert (watch.recent(replace(seen(0), other_containers=(own,))), watch.total) == (None, 0)
    for kills in (0, 1):
        watch.look(seen(kills, key="shared", sees="sidecar"))
    assert watch.recent().count == 1


def test_none_was_counted_only_where_the_counter_was_read_after_the_end():
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.look(seen(0))
    assert watch.recent(seen(0)) is None
    assert watch.recent(left(0)) is None
    assert watch.recent(seen(0, sees="sidecar")) == OomKills(count=0, where=BY_CONTAINER)
    both = replace(seen(0), ended=left(0, age=9.0).ended)
    assert watch.recent(both) == OomKills(count=0, where=BY_CONTAINER)


@pytest.mark.parametrize("silent", [25.0, 300.0])
def test_a_process_that_was_silent_long_before_is_not_the_end(silent):
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.look(seen(0))
    whole = replace(left(0), ended=left(0, age=4.0).ended + left(0, age=silent).ended)
    assert watch.recent(whole) is None


def test_the_container_of_the_life_before_says_nothing():
    watch = OomKillWatch(Clocks(FakeClock()))
    before = [replace(one, started=100) for age in (12.0, 17.0) for one in left(0, key="before", age=age).ended]
    watch.look(seen(0))
    now = replace(seen(0), processes=tuple(replace(one, started=900) for one in seen(0).processes))
    assert watch.recent(replace(now, ended=tuple(before))) is None


@pytest.mark.parametrize(("age", "total"), [(20.0, 1), (130.0, 0)])
def test_a_kill_long_before_the_sidecar_began_is_history(age, total):
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.look(left(1, age=age, kept_bytes=990))
    assert watch.total == total


def test_many_looks_at_one_container_are_one_kill():
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.look(seen(0))
    both = replace(seen(1), ended=left(0).ended)
    for _ in range(3):
        watch.look(both)
    assert (watch.recent().count, watch.total) == (1, 1)


def test_two_engines_in_one_folder_have_counters_of_their_own():
    watch = OomKillWatch(Clocks(FakeClock()))
    for kills in (0, 1):
        watch.look(
            HostReading(
                taken_at=1.0,
                processes=(process("a"), process("b")),
                container=container(kills, "a"),
                other_containers=(container(0, "b"),),
            )
        )
    assert (watch.recent().count, watch.total) == (1, 1)


def test_forged_counters_cost_a_bounded_amount():
    watch = OomKillWatch(Clocks(FakeClock()))
    for number in range(600):
        watch.look(left(2**62, key=f"c{number}"))
    assert len(watch._counts) == 256
    assert len(watch._rises) == 64


def test_a_rank_that_lives_on_tells_it():
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.notice([rank(0, 1), rank(1, 1), rank(2, None)])
    watch.notice([rank(0, 2), rank(1, 2), rank(2, None)])
    assert (watch.recent(), watch.total) == (OomKills(count=1, where="counted where rank 0 runs"), 1)


def test_a_rank_that_outlived_the_end_tells_that_none_was_counted():
    watch = OomKillWatch(Clocks(FakeClock()))
    watch.notice([rank(0, 0)])
    assert watch.recent() is None
    assert watch.recent(alive=[rank(0, 0)]) == OomKills(count=0, where="counted where rank 0 runs")


def test_a_new_containers_count_is_no_rise():
    watch = OomKillWatch(Clocks(FakeClock()))
    for kills in (3, 0, 0):
        watch.notice([rank(0, kills)])
    assert (watch.recent(), watch.total) == (None, 0)


@pytest.mark.parametrize(("dp_rank", "number", "name"), [(0, 1, "rank 1"), (1, 0, "rank 1.0")])
def test_a_rank_of_the_second_engine_is_named_with_it(dp_rank, number, name):
    """Each engine numbers its ranks from 0."""
    watch = OomKillWatch(Clocks(FakeClock()))
    for kills in (1, 2):
        watch.notice([rank(0, 1), replace(rank(number, kills), dp_rank=dp_rank)])
    assert watch.recent() == OomKills(count=1, where=f"counted where {name} runs")


def test_a_rank_alone_counts_where_no_container_of_the_engine_is_seen():
    watch = OomKillWatch(Clocks(FakeClock()))
    for kills in (0, 1):
        watch.look(HostReading(taken_at=1.0))
        watch.notice([rank(0, kills)])
    assert (watch.recent().count, watch.total) == (1, 1)


@pytest.mark.parametrize(("pid", "total"), [(90, 2), (95, 1)])
def test_the_next_containers_count_is_the_engines(pid, total):
    watch = OomKillWatch(Clocks(FakeClock()))
    for kills in (0, 1):
        watch.notice([replace(rank(0, kills), pid=90, pid_started=100)])
    for _ in range(2):
        watch.notice([replace(rank(0, 1), pid=pid, pid_started=900)])
    assert (watch.recent().count, watch.total) == (1, total)
