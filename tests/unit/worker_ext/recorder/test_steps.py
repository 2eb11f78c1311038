"""Steps are counted where the engine calls them, and nothing else about them changes."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest

from highwater_worker.errors import Notes
from highwater_worker.recorder.steps import Progress, Steps
from tests.fakes.clock import FakeClock
from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import fake_worker


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

    def reset_encoder_cache(self) -> str:
        self.during()
        return "reset"


@pytest.fixture
def clock():
    return FakeClock(100.0)


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def steps(clock, worker):
    steps = Steps(clock)
    steps.attach(worker, Notes())
    return steps


def test_a_call_is_as_it_was(worker, steps):
    assert worker.execute_model("plan", flag=True) == ("plan", True)
    assert (worker.execute_model.__name__, worker.execute_model.__doc__) == ("execute_model", "Run the model.")


def test_a_step_is_counted_at_both_its_ends(clock, worker, steps):
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
    worker.during = raising(SystemExit(3))
    with pytest.raises(SystemExit):
        worker.execute_model("plan")
    assert (steps.progress().begun, steps.progress().ended, steps.progress().since) == (1, 1, None)


def test_a_step_that_raised_is_remembered_until_one_succeeds(worker, steps):
    """An engine ends of it; a worker that is told to end within a step has not failed."""

    def fail(error: type[BaseException]) -> None:
        worker.during = raising(error)
        with pytest.raises(error):
            worker.execute_model("plan")

    fail(SystemExit)
    assert steps.has_failed is False
    fail(RuntimeError)
    assert steps.has_failed is True
    worker.during = lambda: None
    worker.execute_model("plan")
    assert steps.has_failed is False


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
    assert set(vars(worker)) == {"during", "execute_model", "sample_tokens", "reset_encoder_cache"}
    steps.detach(worker)
    assert set(vars(worker)) == {"during"}
    worker.execute_model = somebody = lambda plan: plan
    again = Steps()
    again.attach(worker, Notes())
    assert worker.execute_model("plan") == "plan"
    again.detach(worker)
    assert (worker.execute_model, again.progress()) == (somebody, None)


def test_what_somebody_put_over_ours_stays(worker, steps):
    ours = worker.execute_model
    worker.execute_model = somebody = lambda plan: [ours(plan)]
    steps.detach(worker)
    assert worker.execute_model is somebody
    assert worker.execute_model("plan") == [("plan", False)]


def test_a_worker_without_steps_is_named():
    notes, steps, worker = Notes(), Steps(), SimpleNamespace()
    steps.attach(worker, notes)
    assert [note["name"] for note in notes.as_list()] == ["moving.steps_begun"]
    assert (steps.progress(), vars(worker)) == (None, {})


def test_steps_that_pass_the_worker_by_are_not_known():
    worker = fake_worker(execute_model=lambda plan: plan)
    worker.vllm_config.parallel_config.distributed_executor_backend = "ray"
    steps = Steps()
    steps.attach(worker, Notes())
    assert steps.progress() is None
    worker.execute_model("plan")
    assert steps.progress()[:2] == (1, 1)


# --- when to look at memory ---


def plan(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(total_num_scheduled_tokens=tokens)


@pytest.fixture
def looks(clock, worker):
    """Whether memory must be looked at, call by call."""
    looks: list[bool] = []
    worker.steps = Steps(clock, looks.append)
    worker.steps.attach(worker, Notes())
    return looks


def test_memory_must_be_looked_at_after_the_first_steps_without_tokens(worker, looks):
    for tokens in (5, 1, *[0] * 20, 3, 0):
        worker.execute_model(plan(tokens))
    assert looks == [False, False, *[True] * 8, *[False] * 12, False, True]


def test_memory_must_be_looked_at_after_what_follows_the_last_step(worker, looks):
    """Else a call would have begun since the last sample, and an idle worker's memory would not be known any more."""
    worker.execute_model(plan(3))
    worker.sample_tokens("grammar")
    worker.execute_model(plan(0))
    worker.sample_tokens("grammar")
    assert looks == [False, False, True, True]


def test_whether_the_last_step_had_tokens(worker, looks):
    assert worker.steps.was_empty is None
    seen = []
    for tokens in (5, 0, 3):
        worker.execute_model(plan(tokens))
        seen.append(worker.steps.was_empty)
    assert seen == [False, True, False]


def test_a_plan_by_name_and_one_that_does_not_tell_are_steps_with_tokens(worker, looks):
    """No version of the engine ends its work by those."""
    worker.execute_model(scheduler_output=plan(0))
    worker.execute_model(scheduler_output=object())
    worker.sample_tokens("grammar")
    assert looks == [True, False, False]


def test_what_changes_memory_outside_of_steps_must_be_looked_at(worker, looks):
    assert worker.reset_encoder_cache() == "reset"
    assert (looks, worker.steps.calls, worker.steps.progress()[:2]) == ([True], 1, (0, 0))


def test_in_the_middle_of_a_step_memory_is_not_looked_at(worker, looks):
    def within() -> None:
        worker.during = lambda: None
        worker.reset_encoder_cache()
        worker.sample_tokens("grammar")

    worker.during = within
    worker.execute_model(plan(1))
    assert looks == [False]


def test_after_a_step_that_raised_memory_is_not_looked_at(worker, looks):
    worker.during = raising(RuntimeError("no"))
    with pytest.raises(RuntimeError):
        worker.execute_model(plan(1))
    assert looks == []


# --- the worker's end ---


def test_counting_does_not_keep_the_worker():
    worker = Worker()
    worker.execute_model = worker.sample_tokens
    counting, gone = Steps(), weakref.ref(worker)
    counting.attach(worker, Notes())
    del worker
    gc.collect()
    assert gone() is None
    assert counting.calls == 0


# --- outputs that are there later ---


class Output:
    """As an engine's: it can be waited for, once."""

    def __init__(self, wait) -> None:
        self.wait = wait

    def get_output(self, *, flag: bool = False) -> object:
        return self.wait(), flag


def test_a_wait_for_an_output_is_seen(clock, worker, steps):
    seen = []

    def wait() -> str:
        seen.append(steps.outputs.oldest())
        return "tokens"

    output = worker.sample_tokens(Output(wait))
    assert isinstance(output, Output)
    assert steps.outputs.oldest() is None
    clock.now = 105.0
    assert output.get_output(flag=True) == ("tokens", True)
    assert seen == [(105.0, threading.get_ident())]
    assert steps.outputs.oldest() is None


def test_a_wait_within_a_wait_leaves_the_outer_one_seen(clock, worker, steps):
    clock.now = 105.0
    inner, seen = worker.sample_tokens(Output(lambda: "inner")), []

    def wait() -> object:
        clock.now = 106.0
        seen.append(inner.get_output())
        return steps.outputs.oldest()

    (oldest, _) = worker.sample_tokens(Output(wait)).get_output()
    assert (oldest, seen) == ((105.0, threading.get_ident()), [("inner", False)])


def test_an_exception_passes_through_a_wait(worker, steps):
    with pytest.raises(ValueError, match="the device says no"):
        worker.sample_tokens(Output(raising(ValueError("the device says no")))).get_output()
    assert steps.outputs.oldest() is None


def test_a_method_that_is_passed_on_keeps_its_output(worker, steps):
    """The engine may keep nothing but that (vllm 0.12.0, v1/executor/uniproc_executor.py:82-85)."""
    get_output = worker.sample_tokens(Output(lambda: "tokens")).get_output
    gc.collect()
    assert get_output() == ("tokens", False)


def test_an_output_that_nobody_waits_for_is_freed_at_once(worker, steps):
    gc.disable()
    try:
        output = worker.sample_tokens(Output(lambda: None))
        gone = weakref.ref(output)
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_what_cannot_be_waited_for_is_left_alone(worker, steps):
    """Most outputs, and those of classes that cannot be inherited from."""

    class Final(type(Output)):
        def __new__(cls, name, bases, names):
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("not to be inherited from")
            return super().__new__(cls, name, bases, names)

    class Sealed(Output, metaclass=Final):
        pass

    for output in (None, "tokens", 5, Sealed(lambda: 7)):
        kind = type(output)
        assert type(worker.sample_tokens(output)) is kind
    assert Sealed(lambda: 7).get_output() == (7, False)


def test_the_oldest_of_several_waits_counts(clock, steps, worker):
    inside, let_go = threading.Barrier(2), threading.Event()

    def wait() -> None:
        inside.wait(30)
        let_go.wait(30)

    threads = []
    for moment in (101.0, 102.0):
        clock.now = moment
        threads.append(threading.Thread(target=worker.sample_tokens(Output(wait)).get_output))
        threads[-1].start()
        inside.wait(30)
    assert steps.outputs.oldest() == (101.0, threads[0].ident)
    let_go.set()
    for thread in threads:
        thread.join()
