"""The one timer of a process is ours only as long as nobody else wants it."""

from __future__ import annotations

import faulthandler
import sys

import pytest

from highwater_worker.recorder import stacks as module
from highwater_worker.recorder.stacks import Watchdog, is_timer_taken
from highwater_worker.wire import Layout, make_ring
from tests.unit.worker_ext.ring_bytes import watchdog as area


@pytest.fixture
def path(tmp_path):
    return tmp_path / "highwater-00112233445566ff-7.ring"


@pytest.fixture
def timer(monkeypatch):
    """What the process's timer was told; the real one is pytest's here."""
    told: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: told.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: told.append("cancel"))
    return told


@pytest.fixture
def watchdog(path, timer):
    ring = make_ring(path, b"{}", Layout.of(3, 0))
    watchdog = Watchdog(ring)
    watchdog.start()
    yield watchdog
    watchdog.leave()
    ring.close()


def test_the_timer_is_moved_on_once_a_second(watchdog, timer, path):
    for tenth in range(25):
        watchdog.push(100.0 + tenth / 10)
    assert timer == ["cancel", 4.0] * 3
    assert area(path) == (102.0, 4.0, "")


@pytest.mark.parametrize("call", ["dump_traceback_later", "cancel_dump_traceback_later"])
def test_ours_gives_way_for_good(watchdog, timer, call):
    """To whoever calls for it; that call is as it would have been."""
    watchdog.push(100.0)
    timer.clear()
    if call == "dump_traceback_later":
        faulthandler.dump_traceback_later(60.0, repeat=True)
    else:
        faulthandler.cancel_dump_traceback_later()
    assert timer == [60.0 if call == "dump_traceback_later" else "cancel"]
    watchdog.push(200.0)
    watchdog.stop()
    assert len(timer) == 1
    assert watchdog.gives_way


def test_afterwards_the_module_is_as_it_was(path, timer):
    before = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
    watchdog = Watchdog(make_ring(path, b"{}", Layout.of(3, 0)))
    watchdog.start()
    assert faulthandler.dump_traceback_later is not before[0]
    faulthandler.cancel_dump_traceback_later = somebody = lambda: None
    watchdog.stop()
    assert (faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later) == (before[0], somebody)


def test_under_pytest_the_timer_is_taken(monkeypatch):
    assert is_timer_taken()
    monkeypatch.delitem(sys.modules, "_pytest.faulthandler")
    assert not is_timer_taken()


def test_one_that_gives_way_from_the_start_touches_nothing(path, timer):
    """Not even what it would notice others by."""
    before = faulthandler.dump_traceback_later
    watchdog = Watchdog(make_ring(path, b"{}", Layout.of(3, 0)), gives_way=True)
    watchdog.start()
    watchdog.push(100.0)
    watchdog.stop()
    assert (faulthandler.dump_traceback_later, timer) == (before, [])


def test_the_timer_does_not_run_while_the_process_forks(watchdog, timer):
    """Nor is it armed by a thread that comes in between."""
    watchdog.push(100.0)
    timer.clear()
    module._before_fork()
    watchdog.push(105.0)
    assert timer == ["cancel", "cancel"]
    module._after_fork_in_parent()
    watchdog.push(105.0)
    assert timer[-1] == 4.0
    module._after_fork_in_child()
    timer.clear()
    watchdog.push(200.0)
    watchdog.stop()
    assert timer == []
