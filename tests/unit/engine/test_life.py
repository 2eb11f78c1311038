"""The engine's lives: what ranks, files, recorders and the log say of one life counts once."""

from __future__ import annotations

import pytest

from highwater.accounting.components import account
from highwater.engine.life import Lives
from highwater.files.state_file import StateFile
from highwater.readings.engine import EndedLife, Process, ProcessLife
from highwater.readings.rank import Device, RankReading, WorkerMemory


def rank(number: int) -> RankReading:
    """A worker of the life with this number."""
    taken = WorkerMemory(
        rank=0, dp_rank=0, host="pod", pid=90, pid_started=1000 * number + 90, taken_at=0.0, device=Device()
    )
    return account(taken)


def files(number: int, at: float, *, runs: bool = True) -> ProcessLife:
    """Its processes' files: an API server and the worker."""
    processes = frozenset(Process("pod", pid, 1000 * number + pid) for pid in (1, 90))
    end = EndedLife(how="ended without a word")
    return ProcessLife(processes=processes, last_at=at, is_running=runs, has_server=True, is_serving=runs, end=end)


def workers(number: int) -> frozenset[Process]:
    return frozenset({Process("pod", 90, 1000 * number + 90)})


@pytest.fixture
def lives() -> Lives:
    """Of a sidecar that has looked into an empty folder."""
    made = Lives(StateFile(None), started_at=lambda _: None)
    made.see((), 0.0, is_absent=True)
    return made


def die(lives: Lives, number: int, at: float) -> None:
    """A start whose processes are killed before a rank is read."""
    lives.see([files(number, at)], at, is_absent=True)
    lives.see([files(number, at + 1.0, runs=False)], at + 20.0, is_absent=True)


def test_each_start_that_was_killed_is_a_life_and_the_ranks_of_the_next_are_none_more(lives):
    first = lives.present.id
    for number in (1, 2, 3):
        die(lives, number, 100.0 * number)
    assert (lives.present.restarts, lives.present.id == first, lives.attempts.failed) == (3, False, 3)
    lives.see([files(4, 400.0)], 400.0, is_absent=True)
    lives.observe([rank(4)], is_watched=True)
    assert (lives.present.restarts, lives.present.processes, lives.present.baseline_problem) == (3, workers(4), None)


def test_an_engine_that_died_and_the_start_after_it_are_two(lives):
    lives.observe([rank(1)], is_watched=True)
    lives.see([files(1, 5.0)], 5.0, is_absent=False)
    lives.end(10.0)
    assert lives.see([files(1, 9.0, runs=False)], 30.0, is_absent=True) == ()
    assert lives.present.restarts == 0, "the same processes may answer again"
    die(lives, 2, 100.0)
    assert lives.present.restarts == 2


def test_what_died_is_counted_once_where_only_ranks_come_back(lives):
    lives.observe([rank(1)], is_watched=True)
    lives.end(10.0)
    lives.observe([rank(2)], is_watched=True)
    assert lives.present.restarts == 1


@pytest.mark.parametrize("order", ["files log recorders", "log recorders files", "recorders files log"])
def test_whoever_tells_first_the_end_of_a_start_counts_once(lives, order):
    """Its ranks were read while it loaded, and may be read once more before its recorders are known to be dead."""
    lives.see([files(1, 5.0)], 5.0, is_absent=True)
    lives.observe([rank(1)], is_watched=True)
    tell = {
        "files": lambda: lives.see([files(1, 8.0, runs=False)], 25.0, is_absent=True),
        "log": lambda: lives.start_failed(14.0),
        "recorders": lambda: lives.start_ended(workers(1), 10.0),
    }
    first, *others = order.split()
    assert tell[first]()
    if first != "recorders":
        lives.observe([rank(1)], is_watched=True)
    for other in others:
        assert not tell[other]()
    lives.observe([rank(2)], is_watched=True)
    assert lives.present.restarts == 1


def test_a_new_life_is_followed_by_the_name_of_the_old_recorders(lives):
    """Their files look alive for a moment longer than their writers."""
    lives.follow("a" * 16)
    die(lives, 1, 100.0)
    assert lives.present.recorder_instance == "a" * 16
