"""Which reading of a rank counts: the worker's answer, or what its recorder says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.model.engine import EngineLoad
from highwater.model.rank import Device, RankReading, TorchMemory, WorkerMemory
from highwater.watch.ranks import Replicas, Sizes, best_readings, missing_ranks
from highwater.watch.recorder.contents import RankProgress
from highwater.watch.recorder.progress import NO_STEP_SECONDS
from tests.fakes.ranks import reading

FULL = TorchMemory(allocated_bytes=1, reserved_bytes=2)


@dataclass(frozen=True)
class Record:
    """As much of a recorder's record as is looked at."""

    rank: int
    newest: WorkerMemory | None
    status: str = "alive"

    @property
    def identity(self) -> Any:
        return reading(self.rank)


def answered(rank: int, at: float) -> RankReading:
    return replace(reading(rank, taken_at=at), torch=FULL)


def recorded(rank: int, at: float, *, torch: TorchMemory = FULL, status: str = "alive") -> Any:
    newest = WorkerMemory(rank=rank, dp_rank=0, taken_at=at, device=Device(type="cuda"), torch=torch)
    return Record(rank, newest, status)


READINGS = {
    "nobody": ([], [], [], None),
    "no recorders: as they answered": ([answered(1, 5.0), answered(0, 5.0)], [], [], [(1, "rpc"), (0, "rpc")]),
    "a newer record": ([answered(0, 5.0)], [recorded(0, 6.0)], [], [(0, "recorder")]),
    "none that is newer": ([answered(0, 5.0)], [recorded(0, 5.0)], [], [(0, "rpc")]),
    "a newer record that says less": ([answered(0, 5.0)], [recorded(0, 9.0, torch=TorchMemory())], [], [(0, "rpc")]),
    "one that is much newer": ([answered(0, 5.0)], [recorded(0, 10.1, torch=TorchMemory())], [], [(0, "recorder")]),
    "a rank that only its recorder tells of": (
        [answered(0, 5.0)],
        [recorded(1, 5.0)],
        [],
        [(0, "rpc"), (1, "recorder")],
    ),
    "who was left alone": ([], [recorded(1, 5.0)], [answered(0, 4.0)], [(0, "rpc"), (1, "recorder")]),
    "who was left alone and died": (
        [],
        [recorded(1, 5.0), recorded(0, 4.0, status="dead")],
        [answered(0, 4.0)],
        [(1, "recorder")],
    ),
    "nobody is alive": ([], [recorded(0, 5.0, status="silent")], [answered(1, 4.0)], None),
}


@pytest.mark.parametrize(("answers", "records", "kept", "expected"), READINGS.values(), ids=READINGS)
def test_the_best_reading_of_each_rank(answers, records, kept, expected):
    found = best_readings(answers, records, kept=kept, fuller_for_seconds=5.0)
    assert (None if found is None else [(one.rank, one.source) for one in found]) == expected


@pytest.mark.parametrize(
    ("replicas", "there", "missing"),
    [
        (1, [(5, 0)], [(5, 1)]),
        (4, [(4, 0), (4, 1), (5, 0), (6, 0), (6, 1), (7, 0), (7, 1)], [(5, 1)]),
        (4, [(5, 0), (5, 1), (6, 0), (6, 1), (7, 0), (7, 1)], [(4, 0), (4, 1)]),
        (2, [(1, 0), (1, 1)], [(0, 0), (0, 1)]),
    ],
    ids=["external", "hybrid", "hybrid, the first replica", "all in one server"],
)
def test_a_missing_rank_is_one_of_its_servers_own(replicas, there, missing):
    """Behind vLLM's external or hybrid load balancer replicas are numbered through all servers."""
    ranks = [replace(reading(rank, dp_rank=dp), tp_rank=rank) for dp, rank in there]
    found = missing_ranks(Sizes(replicas, 1, 2), ranks, [])
    assert [(rank.dp_rank, rank.tp_rank) for rank in found] == missing


def test_more_ranks_than_there_are_anywhere_are_not_named():
    """A file may say anything, and each name would be made at each poll."""
    assert missing_ranks(Sizes(40_000_000, 1, 1), [], []) == ()


# --- a starved data-parallel engine among others: what is said of it, and what is not ---


STARVED = EngineLoad(requests_running=0, requests_waiting=3, work_done=50.0)


def working(done: float) -> EngineLoad:
    return EngineLoad(requests_running=1, requests_waiting=0, work_done=done)


def told(replicas: Replicas, seconds: range, *records: Any, others: float = 100.0, **more: EngineLoad) -> list[str]:
    """One look a second, while the first engine does 100 tokens a second, or none."""
    sentences: list[str] = []
    for second in seconds:
        engines = {"0": working(others * second), "1": STARVED} | more
        sentences = list(replicas.starved(engines, records, float(second)))
    return sentences


def test_one_that_schedules_nothing_while_another_does_is_named():
    (sentence,) = told(Replicas(), range(20))
    assert sentence.startswith("data-parallel engine 1 (of 2) has scheduled nothing for 19 s while others work: 3 wait")
    assert "no recorder shows its steps" in sentence


def test_others_that_worked_at_some_time_do_not_work_now():
    replicas = Replicas()
    assert told(replicas, range(20))
    assert told(replicas, range(20, 29), others=0.0)
    assert told(replicas, range(30, 60), others=0.0) == []


def test_one_that_only_appears_has_not_worked():
    replicas = Replicas()
    told(replicas, range(20), others=0.0)
    late = EngineLoad(requests_running=0, requests_waiting=0, work_done=1000.0)
    assert told(replicas, range(20, 30), others=0.0, late=late) == []


def test_another_that_leaves_or_begins_anew_changes_nothing():
    replicas = Replicas()
    told(replicas, range(8), late=working(9000.0))
    assert told(replicas, range(8, 20))


@pytest.mark.parametrize(
    ("age", "is_named"), [(1.0, True), (NO_STEP_SECONDS + 1, False)], ids=["empty steps", "no steps"]
)
def test_counts_that_stay_after_an_abort_are_no_starved_engine(age, is_named):
    progress = RankProgress(steps_begun=50, last_step_age_seconds=age, is_out_of_work=True)
    of_rank = SimpleNamespace(identity=SimpleNamespace(dp_rank=1), progress=progress)
    sentences = told(Replicas(), range(20), of_rank)
    assert bool(sentences) == is_named
    assert all("no recorder" not in sentence for sentence in sentences)
