"""A starved data-parallel engine among others: what is said of it, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from highwater.memory.ranks import Replicas
from highwater.readings.engine import EngineLoad
from highwater.recorder.contents import RankProgress
from highwater.recorder.progress import NO_STEP_SECONDS

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
    """All have nothing to do since, or somebody paused them."""
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
    """Its loop makes steps, if empty ones, wherever a request waits."""
    progress = RankProgress(steps_begun=50, last_step_age_seconds=age, is_out_of_work=True)
    of_rank = SimpleNamespace(identity=SimpleNamespace(dp_rank=1), progress=progress)
    sentences = told(Replicas(), range(20), of_rank)
    assert bool(sentences) == is_named
    assert all("no recorder" not in sentence for sentence in sentences)
