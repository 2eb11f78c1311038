"""Where the threads are while something takes long."""

from __future__ import annotations

import threading

import pytest

from highwater_worker.recorder.stacks import Stacks, call_of, ordered


@pytest.fixture
def stacks():
    stacks = Stacks()
    yield stacks
    stacks.close()


def test_a_dump_is_taken_ever_more_seldom(stacks, monkeypatch):
    taken, thread = [], threading.get_ident()
    now = 100.0
    monkeypatch.setattr(stacks, "_dump", lambda: taken.append(round(now - 100.0, 1)) or "x")
    while now < 180.0:
        now += 0.1
        stacks.look(100.0, thread, now)
    assert taken == pytest.approx([1, 2, 4, 8, 16, 32, 62], rel=0.12)


def test_the_last_dump_is_shown_until_what_lasted_is_over(stacks):
    thread = threading.get_ident()
    assert stacks.look(100.0, thread, 100.9) is None
    first = stacks.look(100.0, thread, 101.1)
    assert "test_the_last_dump_is_shown" in first
    assert stacks.look(100.0, thread, 101.2) == first
    assert stacks.look(None, 0, 101.3) is None
    assert stacks.look(101.4, thread, 101.5) is None


def test_the_thread_that_is_asked_for_comes_first(stacks):
    started, let_go = threading.Event(), threading.Event()

    def wait_here() -> None:
        started.set()
        let_go.wait(30)

    thread = threading.Thread(target=wait_here)
    thread.start()
    started.wait(30)
    dump = stacks.look(100.0, thread.ident, 102.0)
    let_go.set()
    thread.join()
    assert dump.startswith(f"Thread 0x{thread.ident:016x}")
    assert dump.index("in wait_here") < dump.index("in test_the_thread_that_is_asked_for")


def test_no_dump_is_taken_where_it_may_end_the_process(stacks, monkeypatch):
    monkeypatch.setattr("sys.version_info", (3, 13, 0, "final", 0))
    with pytest.raises(OSError, match="may end the process"):
        stacks.look(1.0, threading.get_ident(), 5.0)
    with pytest.raises(OSError, match="may end the process"):
        stacks.look_for_call(threading.get_ident(), 5.0)


def test_a_long_dump_is_cut_behind_the_thread_that_is_asked_for():
    """Python lists the main thread last."""
    parts = [f"Thread 0x{n:016x} (most recent call first):\n" + '  File "x.py", line 1 in y\n' * 90 for n in range(9)]
    cut = ordered("\n".join(parts), 8)
    assert cut.startswith("Thread 0x0000000000000008")
    assert len(cut) == 12_000


def frames(*names: str) -> str:
    """A dump whose first thread is in these functions, innermost first; another follows."""
    lines = "\n".join(f'  File "/vllm/x.py", line 1 in {name}' for name in names)
    other = '  File "/vllm/y.py", line 1 in run_method'
    return f"Thread 0x1 (most recent call first):\n{lines}\n\nThread 0x2 (most recent call first):\n{other}\n"


@pytest.mark.parametrize(
    ("names", "call"),
    [
        (("acquire_read", "dequeue", "worker_busy_loop", "worker_main"), None),
        (("copy_", "load_weights", "reload_weights", "_execute_worker_rpc", "worker_busy_loop"), "reload_weights"),
        (("copy_", "load_weights", "reload_weights", "worker_busy_loop"), "reload_weights"),
        (("pull", "update", "decorate_context", "_execute_worker_rpc", "worker_busy_loop"), "update"),
        (("add_lora", "change", "run_method", "collective_rpc", "run_busy_loop"), "add_lora"),
        (("acquire_write", "enqueue_output", "handle_output", "_execute_worker_rpc", "worker_busy_loop"), None),
        (("wait", "get", "_process_input_queue", "run_busy_loop"), None),
        ((), None),
    ],
)
def test_a_call_of_the_engines_is_named(names, call):
    assert call_of(frames(*names)) == call


def test_an_idle_engine_is_looked_at_seldom(stacks, monkeypatch):
    calls = dict.fromkeys(range(7, 12), "reload_weights")
    taken: list[int] = []

    def dump() -> str:
        taken.append(second)
        return frames("x", calls.get(second, "dequeue"), "worker_busy_loop")

    monkeypatch.setattr(stacks, "_dump", dump)
    seen = {}
    for second in range(20):
        seen[second] = stacks.look_for_call(1, float(second))
    assert taken == [0, 5, 10, 11, 12, 17]
    assert {second: call for second, call in seen.items() if call} == dict.fromkeys((10, 11), ("reload_weights", 10.0))
