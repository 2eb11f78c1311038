"""The timer that has the engine's thread write its stack: on real signals, in this process."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from highwater_worker.recorder import stacks as module
from highwater_worker.recorder.stacks import Watchdog
from highwater_worker.wire import Layout, make_ring
from tests.unit.worker_ext.ring_bytes import watchdog as area


@pytest.fixture
def path(tmp_path):
    return tmp_path / "highwater-00112233445566ff-7.ring"


@pytest.fixture
def watchdog(path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.05)
    ring = make_ring(path, b"{}", Layout.of(3, 0))
    watchdog = Watchdog(ring)
    watchdog.start()
    yield watchdog
    watchdog.stop()
    ring.close()


def stack(path, seconds=60.0):
    """What was written in this time; empty: nothing."""
    deadline = time.monotonic() + seconds
    while not area(path)[2] and time.monotonic() < deadline:
        time.sleep(0.01)
    return area(path)[2]


def test_the_engines_thread_writes_its_own_stack(watchdog, path):
    pushing = threading.Thread(target=watchdog.push, args=(100.0,))
    pushing.start()
    pushing.join()
    assert area(path)[:2] == (100.0, 0.05)
    assert "in test_the_engines_thread_writes_its_own_stack" in stack(path)


def test_it_is_moved_on_once_a_second(watchdog, path):
    for tenth in range(25):
        watchdog.push(100.0 + tenth / 10)
    assert area(path) == (102.0, 0.05, "")


def test_a_stopped_one_writes_nothing(watchdog, path):
    watchdog.push(100.0)
    watchdog.stop()
    watchdog.push(200.0)
    assert (stack(path, 0.2), area(path)[0]) == ("", 100.0)


def test_a_signal_that_comes_late_ends_nothing(watchdog, path):
    """Without a handler it would end the process."""
    watchdog.stop()
    signal.raise_signal(module._signal)
    assert area(path)[2] == ""


def test_the_next_recorder_of_a_process_has_the_same_signal(watchdog, path):
    number = module._signal
    watchdog.stop()
    watchdog.start()
    assert module._signal == number
    watchdog.push(100.0)
    assert "in stack" in stack(path)


def test_a_signal_that_something_else_handles_is_left_alone(monkeypatch):
    monkeypatch.setattr(module, "_signal", None)
    free = module._chosen_signal()
    before = signal.signal(free, lambda *_: None)
    try:
        assert module._chosen_signal() < free
    finally:
        signal.signal(free, before)


def test_without_a_free_signal_there_is_no_timer_and_a_reason(path, monkeypatch):
    monkeypatch.setattr(module, "_signal", None)
    monkeypatch.setattr(signal, "SIGRTMAX", signal.SIGRTMIN - 1)
    watchdog = Watchdog(make_ring(path, b"{}", Layout.of(3, 0)))
    with pytest.raises(OSError, match="every real-time signal is in use"):
        watchdog.start()
    watchdog.push(100.0)
    watchdog.stop()
    assert area(path)[0] == 0.0
