"""`record_stacks` turns torch's history on for a bounded time, and off on the main thread after a step or in a call."""

from __future__ import annotations

import json
import sys

import pytest

from highwater_worker.state import state_of
from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import ask, fake_worker, in_a_thread, refusal

ON = {"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": 50_000}
OFF = {"enabled": None}


@pytest.fixture
def module(torch_device):
    return torch_device("npu")


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` lets that much time pass."""
    now = [1_000.0]
    monkeypatch.setattr("highwater_worker.memory.allocator.time.monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def asked(worker, **arguments):
    return ask(worker, "record_stacks", json.dumps(arguments))


def steps(worker, error=None):
    """The engine's next step."""

    def execute_model(*_):
        if error is not None:
            raise error
        return "output"

    worker.execute_model = execute_model
    return worker


def test_it_is_on_until_its_time_is_over(module, clock):
    worker = steps(fake_worker())
    own = worker.execute_model
    answer = asked(worker, minutes=2)
    assert (answer["recording"], answer["was_recording"], answer["seconds_left"]) == (True, False, 120.0)
    assert worker.execute_model(1) == "output"
    clock(119)
    worker.execute_model(2)
    assert module.history == [ON]
    clock(1)
    assert worker.execute_model(3) == "output"
    assert module.history == [ON, OFF]
    assert worker.execute_model is own


def test_a_step_that_fails_ends_it_too_and_fails_as_before(module, clock):
    worker = steps(fake_worker(), MemoryError("out of memory"))
    asked(worker, minutes=1)
    clock(61)
    with pytest.raises(MemoryError, match="out of memory"):
        worker.execute_model()
    assert module.history[-1] == OFF


def test_any_operation_ends_it(module, clock):
    worker = steps(fake_worker())
    asked(worker)
    clock(601)
    ask(worker, "budget")
    assert module.history == [ON, OFF]


def test_no_other_thread_turns_it_off(module, clock):
    """It would take torch's locks, and those belong to the main thread."""
    worker = steps(fake_worker())
    asked(worker, minutes=1)
    clock(61)
    in_a_thread(lambda: (worker.execute_model(), state_of(worker).history.end_if_due()))
    assert module.history == [ON]
    worker.execute_model()
    assert module.history == [ON, OFF]


def test_it_can_be_ended_early_and_made_longer(module, clock):
    worker = steps(fake_worker())
    asked(worker, minutes=1)
    clock(50)
    assert asked(worker, minutes=1, entries=7)["seconds_left"] == 60.0
    assert module.history == [ON, ON | {"max_entries": 7}]
    answer = asked(worker, minutes=0)
    assert (answer["recording"], answer["was_recording"], answer["entries"]) == (False, True, None)
    assert module.history[-1] == OFF
    assert asked(worker, minutes=0)["was_recording"] is False
    assert len(module.history) == 3


def test_somebody_elses_history_is_left_alone(module, monkeypatch):
    monkeypatch.setattr(sys.modules["torch"]._C, "_npu_isHistoryEnabled", lambda: True)
    assert refusal(fake_worker(), "record_stacks").startswith("torch records its history already")
    assert module.history == []


def test_devices_without_history_say_so(torch_device):
    torch_device("cpu")
    error = json.loads(fake_worker("cpu").highwater_rpc("record_stacks"))["error"]
    assert error == {
        "code": "unavailable",
        "message": "PyTorch keeps no allocation history on cpu; it does on npu and cuda",
    }


def test_torchs_own_trouble_fails_no_step(module, clock):
    worker = steps(fake_worker())
    asked(worker, minutes=1)
    clock(61)

    module.memory._record_memory_history = raising(RuntimeError("driver"))
    assert worker.execute_model() == "output"
    assert not state_of(worker).history.is_on
