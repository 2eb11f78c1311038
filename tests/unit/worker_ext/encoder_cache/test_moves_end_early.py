"""A move ends early when its time is up or its process is told to end; no entry is ever lost by that."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import highwater_worker
from tests.unit.worker_ext.encoder_cache.test_restorer import Bench, changed
from tests.unit.worker_ext.fakes import ask

OURS = str(Path(highwater_worker.__file__).parent)


@pytest.fixture
def bench():
    made = Bench(capacity=5000)
    for name in "abcdef":
        made.encode(name)
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass with each copy."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    copied = highwater_worker.encoder_cache.mover.HostCopies._copy

    def slow(*arguments, **options):
        now[0] += 0.125
        return copied(*arguments, **options)

    monkeypatch.setattr(highwater_worker.encoder_cache.mover.HostCopies, "_copy", staticmethod(slow))
    return now


def progress(answer):
    return answer["complete"], answer["remaining_entries"], answer["remaining_bytes"]


def test_a_trim_ends_when_its_time_is_up_and_says_what_is_left(bench, clock):
    answer = ask(bench.worker, "trim", '{"max_seconds": 0.2}')
    assert (answer["spilled_entries"], progress(answer)) == (2, (False, 4, 400))
    answer = ask(bench.worker, "trim", '{"max_seconds": 0.3}')
    assert (answer["spilled_entries"], progress(answer)) == (3, (False, 1, 100))
    answer = ask(bench.worker, "trim")
    assert (answer["spilled_entries"], progress(answer)) == (1, (True, 0, 0))


@pytest.mark.parametrize("target", [{"free_bytes": 300}, {"keep_bytes": 300}])
def test_what_is_left_of_a_target_leads_to_it(bench, clock, target):
    before = bench.torch.live
    answer = ask(bench.worker, "trim", json.dumps(target))
    while not answer["complete"]:
        keep = answer["encoder_cache"]["device_bytes"] - answer["remaining_bytes"]
        answer = ask(bench.worker, "trim", json.dumps({"keep_bytes": keep}))
    reserve = answer["encoder_cache"]["restore_reserve_bytes"]
    assert before - bench.torch.live == 300 - (reserve if "keep_bytes" in target else 0)


def test_every_call_moves_something(bench, clock):
    for left in (5, 4, 3):
        assert ask(bench.worker, "trim", '{"max_seconds": 0}')["remaining_entries"] == left


def test_a_restore_ends_when_its_time_is_up_and_says_what_is_left(bench, clock):
    ask(bench.worker, "trim", '{"max_seconds": 9}')
    answer = ask(bench.worker, "restore", '{"max_seconds": 0.2}')
    assert (answer["restored_entries"], answer["left_entries"], progress(answer)) == (2, 4, (False, 4, 400))
    assert answer["encoder_cache"]["restore_reserve_bytes"] == 100
    answer = ask(bench.worker, "restore", '{"max_seconds": 9}')
    assert (answer["restored_entries"], progress(answer)) == (4, (True, 0, 0))
    assert answer["encoder_cache"]["restore_reserve_bytes"] == 0


def told_to_end_at(line: int, call) -> bool:
    """Raise KeyboardInterrupt at the n-th line of ours that a call comes to; return whether it came so far.

    A line counts when it is come to for the first and for the second time: a third round of a loop shows nothing more.
    """
    lines, visits = itertools.count(1), Counter()

    def trace(frame, event, argument):
        del argument
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            place = frame.f_code, frame.f_lineno
            visits[place] += 1
            if visits[place] <= 2 and next(lines) == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def trimmed(bench):
    ask(bench.worker, "trim", '{"max_seconds": 60}')


CALLS = {
    "trim": (lambda bench: bench.need(), lambda bench: bench.worker.highwater_rpc("trim", '{"max_seconds": 60}')),
    "restore": (trimmed, lambda bench: bench.worker.highwater_rpc("restore", '{"max_seconds": 60}')),
    "access": (trimmed, lambda bench: bench.access("b")),
    "access of the last room": (lambda bench: (trimmed(bench), bench.fill()), lambda bench: bench.access("b")),
}


@pytest.mark.slow("a call that ends at each of its lines")
@pytest.mark.untraced
@pytest.mark.parametrize(("before", "call"), CALLS.values(), ids=CALLS)
def test_wherever_the_end_comes_no_entry_is_lost(before, call):
    for line in itertools.count(1):
        bench = Bench(capacity=5000)
        try:
            bench.encode("a", "b")
            bench.encode("c")
            bench.encode("d")
            before(bench)
            if not told_to_end_at(line, lambda: call(bench)):  # noqa: B023 - called at once
                break
            assert (changed(bench), sorted(bench.cache)) == ([], list("abcd")), line
            bench.torch.foreign = 0
            trimmed(bench)
            answer = ask(bench.worker, "restore", '{"max_seconds": 60}')
            assert (bench.away(), answer["encoder_cache"]["restore_reserve_bytes"]) == ([], 0), line
            assert bench.torch.live == 400, line
        finally:
            bench.close()
    assert line > 20
