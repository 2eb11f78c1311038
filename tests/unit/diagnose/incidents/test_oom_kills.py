"""Kills for memory: where the kernel counts them, reported as long as they are recent; elsewhere unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.diagnose.evidence import OomKills
from highwater.diagnose.incidents.oom_kills import OomKillWatch
from tests.fakes.engine import FakeClock
from tests.fakes.incident import reading


def rank(number: int, kills: int | None):
    known = reading(number)
    return replace(known, host_memory=replace(known.host_memory, cgroup_oom_kills=kills))


def test_a_rise_is_told_for_a_minute():
    """What was counted before the watch began is history."""
    clock, own = FakeClock(), iter([7, 7, 8, 8, 8])
    watch = OomKillWatch(lambda: next(own), clock)
    assert watch.recent() is None
    watch.notice([])
    watch.notice([])
    assert watch.recent().count == 0
    watch.notice([])
    assert watch.recent() == OomKills(count=1, where="counted in the sidecar's own control group")
    clock.advance(60.0)
    assert watch.recent().count == 1
    clock.advance(1.0)
    assert watch.recent().count == 0


def test_a_rank_that_lives_on_tells_it():
    """Ranks of one container tell the same kill, which is one; one that does not count says nothing."""
    watch = OomKillWatch(lambda: None, FakeClock())
    watch.notice([rank(0, 1), rank(1, 1), rank(2, None)])
    watch.notice([rank(0, 2), rank(1, 2), rank(2, None)])
    assert watch.recent() == OomKills(count=1, where="counted where rank 0 runs")


def test_a_new_containers_count_is_no_rise():
    """It begins at 0."""
    watch = OomKillWatch(lambda: None, FakeClock())
    for kills in (3, 0, 0):
        watch.notice([rank(0, kills)])
    assert watch.recent().count == 0


@pytest.mark.parametrize(("dp_rank", "number", "name"), [(0, 1, "rank 1"), (1, 0, "rank 1.0")])
def test_a_rank_of_the_second_engine_is_named_with_it(dp_rank, number, name):
    """Each engine numbers its ranks from 0."""
    watch = OomKillWatch(lambda: None, FakeClock())
    for kills in (1, 2):
        watch.notice([rank(0, 1), replace(rank(number, kills), dp_rank=dp_rank)])
    assert watch.recent() == OomKills(count=1, where=f"counted where {name} runs")
