"""The engine's lives: what ranks, files, recorders and the log say of one life counts once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from highwater.engine.life import EndedStart, Lives, StartAttempts
from highwater.model.components import account
from highwater.model.engine import EndedLife, ProcessLife
from highwater.model.rank import Device, Process, RankReading, WorkerMemory
from highwater.process.state_file import StateFile


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
    lives.follow("a" * 16)
    die(lives, 1, 100.0)
    assert lives.present.recorder_instance == "a" * 16


# --- which facts are of one start: each end counts once, whoever tells it, and nobody else's counts ---


WORD = EndedLife(how="ended without a word")
KILLED = EndedLife(how="was killed by the kernel for memory", oom_kills=1)


def life(number: int, at: float, *, runs: bool = True, serves: bool = True, end: EndedLife = WORD, **changes: object):
    """One life's processes, whose last write was at ``at``: an API server, an EngineCore, a worker."""
    processes = frozenset(Process("pod-a", pid, 1000 * number + pid) for pid in (1, 60, 90))
    known = {"has_server": True, "is_serving": runs and serves, "processes": processes} | changes
    return ProcessLife(last_at=at, is_running=runs, end=end, **known)


def look(attempts: StartAttempts, at: float, *lives: ProcessLife) -> tuple[EndedStart, ...]:
    return attempts.see(lives, at)


def watched(*lives: ProcessLife) -> StartAttempts:
    """Attempts that have looked into the folder before."""
    attempts = StartAttempts()
    attempts.see(lives, 0.0)
    return attempts


def begun() -> StartAttempts:
    """The same, and have seen the first start begin at 5."""
    attempts = watched()
    look(attempts, 5.0, life(1, 5.0))
    return attempts


def hows(ended: Iterable[EndedStart]) -> list[str]:
    return [one.end.how for one in ended]


def test_a_start_whose_processes_fell_silent_has_ended_once():
    attempts = watched()
    assert look(attempts, 5.0, life(1, 5.0)) == ()
    (ended,) = look(attempts, 25.0, life(1, 8.0, runs=False, end=KILLED))
    assert (ended.at, ended.end, attempts.failed, attempts.last) == (8.0, KILLED, 1, ended)
    assert look(attempts, 30.0, life(1, 8.0, runs=False, end=KILLED)) == ()


def test_a_start_that_was_seen_dead_only_has_ended_too():
    """It began and was killed between two looks; its files were written with clocks that may be behind."""
    attempts = watched()
    assert hows(look(attempts, 5.0, life(1, -2.0, runs=False))) == ["ended without a word"]


def test_what_ended_before_the_sidecar_began_is_not_counted_and_the_loop_that_goes_on_is():
    old = life(1, -20.0, runs=False)
    attempts = watched(old)
    look(attempts, 5.0, old, life(2, 5.0))
    assert len(look(attempts, 30.0, old, life(2, 12.0, runs=False))) == 1
    assert attempts.failed == 1


def test_an_engine_that_was_killed_just_before_the_sidecar_began_is_no_start_that_failed():
    """Its file still counts as current: whether it had been ready, nobody here has seen."""
    attempts = watched(life(1, -8.0, serves=False))
    assert look(attempts, 10.0, life(1, -8.0, runs=False, end=KILLED)) == ()
    assert attempts.failed == 0


def test_a_loop_of_three_is_three():
    attempts = watched()
    seen: list[ProcessLife] = []
    for number in (1, 2, 3):
        at = 40.0 * number
        look(attempts, at, *seen, life(number, at))
        seen.append(life(number, at + 2.0, runs=False))
        assert len(look(attempts, at + 20.0, *seen)) == 1
    assert (attempts.failed, attempts.is_under_way) == (3, False)


def test_a_new_life_that_runs_before_the_old_one_is_known_to_be_dead_does_not_hide_it():
    attempts = begun()
    assert look(attempts, 15.0, life(1, 6.0, serves=False), life(2, 15.0)) == ()
    assert len(look(attempts, 22.0, life(1, 6.0, runs=False), life(2, 22.0))) == 1
    assert attempts.is_under_way


def test_processes_that_come_one_after_the_other_are_one_start():
    attempts = watched()
    every = sorted(life(1, 0.0).processes)
    for count in (1, 2, 3):
        look(attempts, 5.0 * count, life(1, 5.0 * count, processes=frozenset(every[:count])))
    assert len(look(attempts, 40.0, life(1, 16.0, runs=False))) == 1


def test_a_start_that_takes_twenty_minutes_has_not_ended():
    attempts = watched()
    for at in range(0, 1200, 5):
        assert look(attempts, at, life(1, at)) == ()


def test_a_life_that_the_engine_responded_in_is_no_start_that_failed():
    attempts = begun()
    attempts.responded([life(1, 10.0)])
    attempts.ended_after(12.0)
    assert look(attempts, 30.0, life(1, 12.0, runs=False)) == ()


def test_a_new_worker_of_a_life_that_is_over_is_not_another_life():
    attempts = watched()
    attempts.responded([life(1, 5.0)])
    attempts.ended_after(12.0)
    more = life(1, 12.0, runs=False, processes=life(1, 0.0).processes | {Process("pod-a", 99, 4711)})
    assert look(attempts, 30.0, more) == ()
    assert look(attempts, 35.0, life(9, 11.0, runs=False)) == ()


def test_the_start_after_a_death_counts():
    attempts = watched()
    attempts.responded([life(1, 5.0)])
    attempts.ended_after(12.0)
    look(attempts, 20.0, life(1, 12.0, serves=False), life(2, 20.0))
    assert len(look(attempts, 50.0, life(1, 12.0, runs=False), life(2, 30.0, runs=False))) == 1


def test_several_engines_that_share_the_folder_count_for_none():
    attempts = watched()
    look(attempts, 5.0, life(1, 5.0), life(2, 5.0))
    assert look(attempts, 30.0, life(1, 30.0), life(2, 9.0, runs=False)) == ()
    look(attempts, 40.0, life(1, 40.0), life(3, 40.0))
    assert look(attempts, 60.0, life(1, 60.0), life(3, 42.0, runs=False)) == ()


def test_files_that_are_removed_may_be_a_planned_stop():
    attempts = begun()
    assert look(attempts, 10.0) == ()
    look(attempts, 15.0, life(1, 15.0))
    assert look(attempts, 20.0) == ()
    (ended,) = look(attempts, 25.0)
    assert (ended.may_be_planned, ended.end.how, attempts.failed) == (True, "ended", 1)


@pytest.mark.parametrize(("pause", "is_planned"), [(30.0, False), (500.0, False), (700.0, True)])
def test_a_start_that_ends_by_itself_soon_after_another_is_no_planned_stop(pause, is_planned):
    attempts = begun()
    look(attempts, 10.0)
    (first,) = look(attempts, 15.0)
    for at in (pause, pause + 900.0):
        look(attempts, at, life(2, at))
    look(attempts, pause + 910.0)
    (again,) = look(attempts, pause + 920.0)
    assert (first.may_be_planned, again.may_be_planned) == (True, is_planned)


FULL = EndedLife(how="ended without a word, probably killed by the kernel for memory,")


@pytest.mark.parametrize(
    ("left", "is_by_itself"),
    [(EndedLife(how=WORD.how, processes="EngineCore"), True), (FULL, False), (KILLED, False)],
    ids=["beside one that did not", "its container nearly full", "after a kill by the kernel"],
)
def test_an_api_server_that_removed_its_file_was_not_planned_to_stop(left, is_by_itself):
    attempts = begun()
    (ended,) = look(attempts, 25.0, life(1, 8.0, runs=False, has_server=False, end=left))
    assert (ended.is_by_itself, ended.may_be_planned) == (is_by_itself, False)
    assert is_by_itself or ended.end == left


def test_the_log_and_the_files_tell_one_end_whoever_comes_first():
    for log_first in (True, False):
        attempts = begun()
        if log_first:
            assert attempts.log_told(frozenset(), 9.0)
        ended = look(attempts, 25.0, life(1, 8.0, runs=False))
        assert (len(ended), attempts.log_told(frozenset(), 30.0)) == ((0, True) if log_first else (1, False))
        assert attempts.failed == (2 if log_first else 1), "the second word of a log is another start"


def test_a_log_that_says_so_of_a_start_whose_files_come_late_is_told_once():
    attempts = watched()
    assert attempts.log_told(frozenset(), 9.0)
    assert look(attempts, 10.0, life(1, 8.0, serves=False)) == ()
    assert look(attempts, 30.0, life(1, 8.0, runs=False)) == ()


def test_with_a_log_alone_each_start_that_it_names_counts():
    attempts = StartAttempts()
    assert [attempts.log_told(frozenset(), at) for at in (10.0, 50.0, 90.0)] == [True] * 3
    assert (attempts.failed, attempts.last.end.how) == (3, "failed")


def test_a_log_that_begins_again_tells_of_an_end_that_the_files_have_shown_minutes_before():
    attempts = begun()
    assert len(look(attempts, 25.0, life(1, 8.0, runs=False))) == 1
    look(attempts, 300.0, life(2, 300.0))
    assert not attempts.log_told(frozenset(), 301.0, is_silent=True)
    assert len(look(attempts, 325.0, life(2, 305.0, runs=False, end=KILLED))) == 1
    assert (attempts.failed, attempts.last.end) == (2, KILLED)


def test_of_a_life_whose_files_fall_silent_the_files_decide():
    """A pod's first restart: the log begins again before the old files are old enough."""
    attempts = begun()
    look(attempts, 15.0, life(1, 6.0, serves=False))
    assert not attempts.log_told(frozenset(), 16.0, is_silent=True)
    look(attempts, 20.0, life(1, 6.0, serves=False), life(2, 20.0))
    assert hows(look(attempts, 25.0, life(1, 6.0, runs=False, end=KILLED), life(2, 25.0))) == [KILLED.how]
    assert attempts.log_told(frozenset(), 40.0), "the log's word on the first is not kept for the second"
    assert attempts.failed == 2


def test_recorders_and_files_of_the_same_workers_are_one_end():
    workers = frozenset({Process("pod-a", 90, 1090)})
    for files_first in (True, False):
        attempts = begun()
        if files_first:
            look(attempts, 25.0, life(1, 8.0, runs=False))
        assert attempts.recorders_told(workers, 26.0) is not files_first
        assert look(attempts, 45.0, life(1, 8.0, runs=False)) == ()
        assert (attempts.log_told(workers, 40.0), attempts.failed) == (False, 1)


def test_an_engine_that_responds_ends_the_series():
    attempts = watched()
    look(attempts, 5.0, life(1, 2.0, runs=False))
    attempts.responded([life(2, 9.0)])
    assert (attempts.failed, attempts.last) == (0, None)


def test_one_look_is_taken_once():
    attempts = begun()
    for _ in range(9):
        assert look(attempts, 10.0) == ()


def test_what_is_over_is_kept_within_bounds_however_often_the_engine_responds():
    attempts = StartAttempts()
    for number in range(2000):
        attempts.responded([life(number, 0.0)])
    assert len(attempts._over) <= 4096
    assert look(attempts, 5.0, life(1999, 0.0, runs=False)) == ()
