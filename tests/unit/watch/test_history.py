"""The ring of readings, the events, the marks and the watchers: bounded in every direction."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import pytest

from highwater.model.components import ROW, MemoryPoint
from highwater.model.engine import EngineStatus, WorkCounts
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event, Report
from highwater.process.clocks import Clocks
from highwater.watch.history import (
    EVENTS_KEPT,
    MARKS_KEPT,
    MAX_OPERATORS_WATCHING,
    MAX_READINGS,
    MAX_WATCHERS,
    MAX_WATCHERS_PER_PEER,
    WATCHER_BACKLOG,
    History,
)
from tests.fakes.engine import IMAGE_BYTES, IMAGES, MIB, USED_READY, FakeClock, FakeEngine

READY = EngineStatus(url="http://engine", state="ready", requests_running=3, kv_cache_usage_ratio=0.41)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def fake(clock) -> FakeEngine:
    return FakeEngine(clock=clock)


@pytest.fixture
def history(clock) -> History:
    return History(5, clocks=Clocks(clock, clock))


def report(fake: FakeEngine, *, stale: bool = False) -> Report:
    ranks = fake.readings()
    return Report(taken_at=ranks[0].taken_at, age_seconds=0.0, stale=stale, engine=READY, ranks=ranks)


def add(history: History, fake: FakeEngine, clock: FakeClock, count: int, step: float = 1.0) -> None:
    for _ in range(count):
        history.add(report(fake))
        clock.advance(step)


def shown(history: History, *, since: float = 0.0, step: float = 0.0) -> list[dict]:
    used, readings = history.readings(since, step)
    assert used == step
    return readings


# --- readings ---


def test_a_reading_comes_back_as_it_was(fake, clock):
    fake.serve_images()
    history = History(5, clocks=Clocks(clock, clock), host_kept_bytes=lambda: 5 * MIB)
    history.add(report(fake))
    (reading,) = shown(history)
    assert (reading["at"], reading["host_kept_bytes"]) == (1000.0, 5 * MIB)
    assert (reading["requests_running"], reading["requests_waiting"]) == (3, None)
    assert reading["kv_cache_usage_ratio"] == 0.41
    rank = reading["ranks"][1]
    assert (rank["rank"], rank["dp_rank"], rank["pid"]) == (1, 0, 4243)
    was = report(fake).ranks[1]
    assert {name: rank[name] for name in ROW} == MemoryPoint.of(was).row()
    assert MemoryPoint.of_row(was.taken_at, rank) == MemoryPoint.of(was)
    assert type(rank["used_bytes"]) is int


def test_a_reading_has_the_counts_of_requests_at_its_time(fake, clock):
    proxied: list[int | None] = [None, 3]
    history = History(5, clocks=Clocks(clock, clock), proxied=lambda: proxied.pop(0))
    history.add(replace(report(fake), engine=replace(READY, work=WorkCounts(requests=7.0))))
    clock.advance(1.0)
    history.add(report(fake))
    counts = [(reading["requests_ended"], reading["proxy_requests_ended"]) for reading in shown(history)]
    assert counts == [(7, None), (None, 3)]


def test_the_ring_forgets_the_oldest(history, fake, clock):
    add(history, fake, clock, 8)
    assert [reading["at"] for reading in shown(history)] == [1003.0, 1004.0, 1005.0, 1006.0, 1007.0]


def test_a_stale_report_is_no_reading(history, fake):
    """An engine that is gone must not look alive in a graph."""
    history.add(report(fake, stale=True))
    history.add(Report(engine=READY))
    assert shown(history) == []


def test_since_counts_its_moment_in(history, fake, clock):
    add(history, fake, clock, 4)
    assert [reading["at"] for reading in shown(history, since=1002.0)] == [1002.0, 1003.0]


def test_of_each_step_the_last_reading_is_shown(history, fake, clock):
    add(history, fake, clock, 5)
    assert [reading["at"] for reading in shown(history, step=2.0)] == [1001.0, 1003.0, 1004.0]


def test_more_readings_than_one_answer_holds_are_thinned(fake, clock):
    """Megabytes of JSON would hold up every stream of the proxy; the step that was used is told."""
    history = History(2 * MAX_READINGS, clocks=Clocks(wall=clock))
    add(history, fake, clock, 2 * MAX_READINGS)
    step, readings = history.readings(0.0, 0.0)
    assert step > 2.0
    assert MAX_READINGS - 1 <= len(readings) <= MAX_READINGS + 1
    assert readings[-1]["at"] == clock.now - 1.0
    assert history.readings(0.0, 100.0)[0] == 100.0


def test_a_track_is_of_each_rank_up_to_its_reading_here(history, fake, clock):
    add(history, fake, clock, 3)
    tracks = history.tracks(fake.readings(), 2.0)
    assert {key: (track.at, track.used) for key, track in tracks.items()} == {
        (0, number): ([1001.0, 1002.0, 1003.0], [USED_READY] * 3) for number in (0, 1)
    }
    assert set(tracks[0, 0].part("kv_cache_bytes")) == {fake.readings()[0].components.kv_cache_bytes}
    add(history, fake, clock, 1, step=0.0)
    assert history.tracks(fake.readings(), 2.0)[0, 0].at == [1001.0, 1002.0, 1003.0]


def test_a_track_begins_with_the_process(history, fake, clock):
    add(history, fake, clock, 2)
    fake.start_again()
    add(history, fake, clock, 2)
    assert history.tracks(fake.readings(), 60.0)[0, 0].at == [1002.0, 1003.0, 1004.0]


def test_a_track_skips_what_is_not_known(history, fake, clock):
    ranks = tuple(replace(rank, used_bytes=None) for rank in fake.readings())
    history.add(replace(report(fake), ranks=ranks))
    assert history.tracks(ranks, 60.0) == {}
    clock.advance(1.0)
    assert history.tracks(fake.readings(), 60.0)[0, 0].at == [1001.0]


def given_back(credited: int | None, outcome: str = "done") -> RemedyResult:
    return RemedyResult(remedy="release", outcome=outcome, credited_bytes=credited)


def test_resets_states_and_marks_cut_a_track(history, fake, clock):
    for kind, result, cut in [
        ("reset", given_back(None, "observed"), -math.inf),
        ("policy", None, -math.inf),
        ("reset", given_back(0), 1002.0),
        ("state", None, 1003.0),
        ("mark", None, 1004.0),
    ]:
        history.record(kind, "", result=result)
        assert (history.tracks(fake.readings(), 60.0)[0, 0].cut_at) == cut
        clock.advance(1.0)


def test_what_lies_before_a_relief_by_hand_is_left_out_unless_it_comes_again(history, fake, clock):
    add(history, fake, clock, 2)
    history.record("reset", "", trigger="reclaim", result=given_back(7))
    clock.advance(1.0)
    history.record("reset", "", trigger="reclaim", result=given_back(7))
    clock.advance(1.0)
    track = history.tracks(fake.readings(), 60.0)[0, 0]
    assert (track.at, track.reliefs, track.policy_reliefs) == ([1004.0], [1003.0], [])
    history.record("reset", "", trigger="policy", result=given_back(7))
    track = history.tracks(fake.readings(), 60.0)[0, 0]
    assert (track.at, track.reliefs, track.policy_reliefs) == ([1000.0, 1001.0, 1004.0], [1004.0], [1004.0])


# --- events ---


def test_events_are_numbered_and_shown_newest_first(history, clock):
    for number in range(3):
        history.record("state", f"event {number}")
        clock.advance(1.0)
    assert [(event.id, event.at) for event in history.events()] == [(3, 1002.0), (2, 1001.0), (1, 1000.0)]
    assert [event.id for event in history.events(limit=2)] == [3, 2]
    assert [event.id for event in history.events(since=1001.0)] == [3, 2]


def test_an_event_carries_what_was_done(history):
    result = RemedyResult(remedy="release", outcome="done", freed_bytes=5)
    event = history.record("reset", "release done", trigger="policy", rule="device", result=result)
    assert history.events() == [event]
    assert (event.trigger, event.rule, event.result) == ("policy", "device", result)


def test_too_many_events_forget_the_oldest(history):
    for number in range(EVENTS_KEPT + 3):
        history.record("state", str(number))
    events = history.events()
    assert (len(events), events[0].id, events[-1].id) == (EVENTS_KEPT, EVENTS_KEPT + 3, 4)


# --- marks ---


def test_a_mark_keeps_the_readings_of_its_moment(history, fake, clock):
    mark = history.mark("before", fake.readings())
    clock.advance(5.0)
    fake.serve_images()
    assert (mark.at, mark.ranks[0].used_bytes) == (1000.0, USED_READY)
    assert (
        history.events()[0].summary
        == f"mark 'before' at {2 * USED_READY / 1024 / MIB:.2f} GiB used on 2 ranks together"
    )
    assert fake.readings()[0].used_bytes == USED_READY + IMAGES * IMAGE_BYTES


def test_a_name_used_again_moves_to_now(history, clock):
    for name in ("a", "b", "a"):
        history.mark(name, ())
        clock.advance(1.0)
    assert {name: mark.at for name, mark in history.marks.items()} == {"b": 1001.0, "a": 1002.0}
    assert list(history.marks) == ["b", "a"]


def test_too_many_marks_forget_the_oldest(history):
    for number in range(MARKS_KEPT + 2):
        history.mark(str(number), ())
    assert (len(history.marks), next(iter(history.marks))) == (MARKS_KEPT, "2")


# --- watchers ---


async def test_a_watcher_is_told_of_reports_and_events(history, fake):
    history.record("state", "before")
    with history.watch() as queue:
        history.record("state", "now")
        history.add(report(fake, stale=True))
        assert [type(queue.get_nowait()) for _ in range(2)] == [Event, Report]
        assert queue.empty()


async def test_one_that_left_is_told_nothing(history):
    with history.watch() as queue:
        pass
    history.record("state", "later")
    assert queue.empty()


async def test_a_watcher_that_is_too_slow_is_ended(history):
    with history.watch() as slow, history.watch() as quick:
        for number in range(WATCHER_BACKLOG + 1):
            history.record("state", str(number))
            assert quick.get_nowait().id == number + 1
        told = [slow.get_nowait() for _ in range(WATCHER_BACKLOG)]
        assert (told[-1], slow.empty()) == (None, True)
        history.record("state", "after")
        assert slow.empty()


async def test_there_is_room_for_so_many_watchers(history):
    peers = [f"10.0.0.{number}" for number in range(MAX_WATCHERS)]
    with ExitStack() as stack:
        for peer in peers:
            assert history.can_watch(peer)
            stack.enter_context(history.watch(peer))
        assert not history.can_watch("10.0.1.1")
    assert history.can_watch("10.0.1.1")


async def test_one_address_does_not_take_every_place(history):
    with ExitStack() as stack:
        for _ in range(MAX_WATCHERS_PER_PEER):
            assert history.can_watch("10.0.0.1")
            stack.enter_context(history.watch("10.0.0.1"))
        assert not history.can_watch("10.0.0.1")
        assert history.can_watch("10.0.0.2")


async def test_a_caller_with_the_token_always_finds_a_place(history):
    with ExitStack() as stack:
        for number in range(MAX_WATCHERS):
            stack.enter_context(history.watch(f"10.0.0.{number}"))
        for _ in range(MAX_OPERATORS_WATCHING):
            assert history.can_watch()
            stack.enter_context(history.watch())
        assert not history.can_watch()


async def test_closing_ends_every_watcher(history):
    with history.watch() as first, history.watch() as second:
        history.close()
        assert (first.get_nowait(), second.get_nowait()) == (None, None)
