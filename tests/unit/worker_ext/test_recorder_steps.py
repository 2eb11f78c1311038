"""Steps are counted where the engine calls them, and nothing else about them changes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tests.unit.worker_ext.fakes import fake_worker
from worker_ext.notes import Notes
from worker_ext.recorder.steps import Progress, Steps


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """A worker with both calls of a step; `during` runs in the middle of one."""

    def __init__(self) -> None:
        self.during = lambda: None

    def execute_model(self, scheduler_output: object, *, flag: bool = False) -> object:
        """Run the model."""
        self.during()
        return scheduler_output, flag

    def sample_tokens(self, grammar_output: object) -> object:
        self.during()
        return grammar_output


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def steps(clock, worker):
    steps = Steps(clock)
    steps.attach(worker, Notes())
    return steps


def test_a_call_is_as_it_was(worker, steps):
    """Arguments, result, name and text."""
    assert worker.execute_model("plan", flag=True) == ("plan", True)
    assert (worker.execute_model.__name__, worker.execute_model.__doc__) == ("execute_model", "Run the model.")


def test_a_step_is_counted_at_both_its_ends(clock, worker, steps):
    """With when it began, and on which thread."""
    seen = []
    worker.during = lambda: seen.append(steps.progress())
    assert steps.progress() == Progress(0, 0, None, None, 0)
    worker.execute_model("plan")
    clock.now = 101.0
    worker.execute_model("plan")
    me = threading.get_ident()
    assert seen == [Progress(1, 0, 100.0, 100.0, me), Progress(2, 1, 101.0, 101.0, me)]
    assert steps.progress() == Progress(2, 2, None, 101.0, me)


def test_an_exception_passes_and_ends_the_step(worker, steps):
    """Whatever it is."""

    def fail() -> None:
        raise SystemExit(3)

    worker.during = fail
    with pytest.raises(SystemExit):
        worker.execute_model("plan")
    assert (steps.progress().begun, steps.progress().ended, steps.progress().since) == (1, 1, None)


def test_the_second_call_of_a_step_is_time_in_it_and_no_further_step(clock, worker, steps):
    """Newer engines sample in a call of its own."""
    seen = []
    worker.execute_model("plan")
    clock.now = 101.0
    worker.during = lambda: seen.append(steps.progress())
    assert worker.sample_tokens("grammar") == "grammar"
    clock.now = 102.0
    assert [(one.begun, one.ended, one.since) for one in seen] == [(1, 1, 101.0)]
    assert (steps.progress().begun, steps.progress().since, steps.progress().last) == (1, None, 101.0)


def test_a_call_within_a_call_leaves_the_outer_one_running(clock, worker, steps):
    """A worker may call its own methods."""
    seen = []

    def within() -> None:
        worker.during = lambda: None
        clock.now = 105.0
        worker.sample_tokens("grammar")
        seen.append(steps.progress().since)

    worker.during = within
    worker.execute_model("plan")
    assert seen == [100.0]
    assert steps.progress()[:3] == (1, 1, None)


def test_afterwards_the_worker_is_as_it_was(worker, steps):
    """Its class's methods again, or an attribute that somebody else had put there."""
    assert {"execute_model", "sample_tokens"} <= set(vars(worker))
    steps.detach(worker)
    assert set(vars(worker)) == {"during"}
    worker.execute_model = somebody = lambda plan: plan
    again = Steps()
    again.attach(worker, Notes())
    assert worker.execute_model("plan") == "plan"
    again.detach(worker)
    assert (worker.execute_model, again.progress()) == (somebody, None)


def test_what_somebody_put_over_ours_stays(worker, steps):
    """To take it away is not ours."""
    ours = worker.execute_model
    worker.execute_model = somebody = lambda plan: [ours(plan)]
    steps.detach(worker)
    assert worker.execute_model is somebody
    assert worker.execute_model("plan") == [("plan", False)]


def test_a_worker_without_steps_is_named():
    """Null, not nought."""
    notes, steps, worker = Notes(), Steps(), SimpleNamespace()
    steps.attach(worker, notes)
    assert [note["name"] for note in notes.as_list()] == ["moving.steps_begun"]
    assert (steps.progress(), vars(worker)) == (None, {})


def test_steps_that_pass_the_worker_by_are_not_known():
    """Ray's first executor calls the runner; its second calls the worker, as all others do."""
    worker = fake_worker(execute_model=lambda plan: plan)
    worker.vllm_config.parallel_config.distributed_executor_backend = "ray"
    steps = Steps()
    steps.attach(worker, Notes())
    assert steps.progress() is None
    worker.execute_model("plan")
    assert steps.progress()[:2] == (1, 1)
