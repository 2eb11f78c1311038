"""Which reading of a rank counts: the worker's answer, or what its recorder says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from highwater.memory.ranks import Sizes, best_readings, missing_ranks
from highwater.readings.rank import Device, RankReading, TorchMemory, WorkerMemory
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


@pytest.mark.parametrize(
    ("answers", "records", "kept", "expected"),
    [
        ([], [], [], None),
        ([answered(1, 5.0), answered(0, 5.0)], [], [], [(1, "rpc"), (0, "rpc")]),
        ([answered(0, 5.0)], [recorded(0, 6.0)], [], [(0, "recorder")]),
        ([answered(0, 5.0)], [recorded(0, 5.0)], [], [(0, "rpc")]),
        ([answered(0, 5.0)], [recorded(0, 9.0, torch=TorchMemory())], [], [(0, "rpc")]),
        ([answered(0, 5.0)], [recorded(0, 10.1, torch=TorchMemory())], [], [(0, "recorder")]),
        ([answered(0, 5.0)], [recorded(1, 5.0)], [], [(0, "rpc"), (1, "recorder")]),
        ([], [recorded(1, 5.0)], [answered(0, 4.0)], [(0, "rpc"), (1, "recorder")]),
        ([], [recorded(1, 5.0), recorded(0, 4.0, status="dead")], [answered(0, 4.0)], [(1, "recorder")]),
        ([], [recorded(0, 5.0, status="silent")], [answered(1, 4.0)], None),
    ],
    ids=[
        "nobody",
        "no recorders: as they answered",
        "a newer record",
        "none that is newer",
        "a newer record that says less",
        "one that is much newer",
        "a rank that only its recorder tells of",
        "who was left alone",
        "who was left alone and died",
        "nobody is alive",
    ],
)
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
