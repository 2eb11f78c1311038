"""Wrapped methods of a worker: calls pass unchanged, and the worker is not kept alive."""

import gc
import weakref

from highwater_worker.wrapping import unwrap_method, wrap_method


class Worker:
    def step(self, number: int, *, twice: bool = False) -> int:
        return number * (2 if twice else 1)


def counted(calls: list[tuple]):
    def make(method):
        def wrapper(*arguments, **named):
            calls.append(arguments)
            return method(*arguments, **named)

        return wrapper

    return make


def test_a_call_passes_through_the_wrapper_and_returns_the_methods_result():
    worker, calls = Worker(), []
    assert wrap_method(worker, "step", counted(calls))
    assert worker.step(3, twice=True) == 6
    assert calls == [(3,)]


def test_a_missing_method_changes_nothing():
    worker = Worker()
    assert not wrap_method(worker, "absent", counted([]))
    assert vars(worker) == {}


def test_unwrapping_restores_the_class_method():
    worker = Worker()
    wrap_method(worker, "step", counted([]))
    assert unwrap_method(worker, "step", worker.step)
    assert vars(worker) == {}
    assert worker.step(1) == 1


def test_unwrapping_restores_an_instance_attribute_that_was_there_before():
    worker = Worker()
    worker.step = own = lambda number: -number
    wrap_method(worker, "step", counted([]))
    assert worker.step(2) == -2
    assert unwrap_method(worker, "step", worker.step)
    assert worker.step is own


def test_a_wrapper_of_somebody_elses_over_ours_stays():
    worker, ours = Worker(), []
    wrap_method(worker, "step", counted(ours))
    first = worker.step
    wrap_method(worker, "step", counted([]))
    assert not unwrap_method(worker, "step", first)
    worker.step(1)
    assert ours == [(1,)]


def test_a_wrapped_worker_can_be_collected():
    worker = Worker()
    wrap_method(worker, "step", counted([]))
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None
