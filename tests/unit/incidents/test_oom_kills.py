"""Kills for memory: counted by whoever can, told as long as they are recent, and unknown where nobody counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.incidents import OomKills
from highwater.incidents.oom_kills import OomKillWatch, own_count
from tests.fakes.engine import FakeClock
from tests.fakes.incident import reading

V1 = "12:memory:/docker/1\n4:cpu,cpuacct:/\n0::/\n"


def rank(number: int, kills: int | None):
    known = reading(number)
    return replace(known, host_memory=replace(known.host_memory, cgroup_oom_kills=kills))


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.events": "oom 2\noom_kill 5\noom_group_kill 1\n"}, 5),
        ("0::/system.slice/hw.service\n", {"sys/fs/cgroup/system.slice/hw.service/memory.events": "oom_kill 0\n"}, 0),
        ("0::/of/the/host\n", {"sys/fs/cgroup/memory.events": "oom_kill 1\n"}, 1),
        (V1, {"sys/fs/cgroup/memory/docker/1/memory.oom_control": "under_oom 0\noom_kill 3\n"}, 3),
        (V1, {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill 4\n"}, 4),
        ("0::/\n", {}, None),
        ("0::/\n", {"sys/fs/cgroup/memory.events": "oom_kill x\n"}, None),
        ("garbage", {}, None),
        (None, {}, None),
    ],
)
def test_the_own_groups_count_is_read(tmp_path, groups, files, count):
    """Of either version, in a container and beside one; what cannot be read is no zero."""
    for name, text in ({"proc/self/cgroup": groups} if groups is not None else {}).items() | files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert own_count(tmp_path) == count


def test_a_rise_is_told_for_a_minute():
    """What was counted before the watch began is history."""
    clock, own = FakeClock(), iter([7, 7, 8, 8, 8])
    watch = OomKillWatch(lambda: next(own), clock)
    assert watch.lately() is None
    watch.notice([])
    watch.notice([])
    assert watch.lately().count == 0
    watch.notice([])
    assert watch.lately() == OomKills(count=1, where="counted in the sidecar's own control group")
    clock.advance(60.0)
    assert watch.lately().count == 1
    clock.advance(1.0)
    assert watch.lately().count == 0


def test_a_rank_that_lives_on_tells_it():
    """Ranks of one container tell the same kill, which is one; one that does not count says nothing."""
    watch = OomKillWatch(lambda: None, FakeClock())
    watch.notice([rank(0, 1), rank(1, 1), rank(2, None)])
    watch.notice([rank(0, 2), rank(1, 2), rank(2, None)])
    assert watch.lately() == OomKills(count=1, where="counted where rank 0 runs")


def test_a_new_containers_count_is_no_rise():
    """It begins at 0."""
    watch = OomKillWatch(lambda: None, FakeClock())
    for kills in (3, 0, 0):
        watch.notice([rank(0, kills)])
    assert watch.lately().count == 0
