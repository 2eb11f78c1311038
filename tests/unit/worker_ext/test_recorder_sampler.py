"""A sample has what `memory` has, costs little, keeps nothing, and survives whatever fails."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from tests.unit.worker_ext.fakes import FakeModel, FakeTensor, ask, fake_runner, fake_worker
from worker_ext.devices import device_of
from worker_ext.notes import Notes
from worker_ext.recorder import encoder_watch
from worker_ext.recorder.calls import Calls
from worker_ext.recorder.sampler import Sampler
from worker_ext.recorder.steps import Steps
from worker_ext.state import WorkerState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Bench:
    """A sampler beside its worker, on a clock that the test moves."""

    def __init__(self, kind: str = "npu", **attributes: object) -> None:
        self.clock = Clock()
        self.worker = fake_worker(kind, None if kind == "cpu" else 1, execute_model=lambda plan: plan(), **attributes)
        self.cache: dict[str, object] = self.worker.model_runner.encoder_cache
        self.state = WorkerState()
        self.steps, self.calls = Steps(self.clock), Calls(self.clock)
        self.steps.attach(self.worker, Notes())
        self.sampler = Sampler(self.state, self.steps, self.calls)
        self.sampler.use(device_of(self.worker))

    def step(self) -> None:
        self.worker.execute_model(lambda: None)

    def memory(self) -> dict[str, object]:
        return self.sampler.memory(self.worker, self.clock.now)

    def moving(self) -> dict[str, object]:
        return self.sampler.moving(self.clock.now)


@pytest.fixture
def bench(torch_device):
    torch_device("npu")
    return Bench()


@pytest.fixture
def readings(monkeypatch):
    """How often the whole cache was read."""
    done, read = [], encoder_watch.read_encoder_outputs
    monkeypatch.setattr(encoder_watch, "read_encoder_outputs", lambda *args: done.append(args) or read(*args))
    return done


@pytest.mark.parametrize("kind", ["npu", "cpu"])
def test_a_sample_has_what_memory_answers(kind, torch_device):
    """The same names and figures, but for what the file's head says."""
    torch_device("npu")
    cache = {"a": FakeTensor(50, device=kind), "b": FakeTensor(5, device=kind)}
    runner = fake_runner(kind, encoder_cache=cache, get_model=lambda: FakeModel(device=kind))
    bench = Bench(kind, model_runner=runner)
    answer, sample = ask(bench.worker, "memory"), bench.memory()
    assert "releasable_bytes" in sample
    assert set(answer) - set(sample) >= {"device", "budget", "kv_cache_reserved_bytes"}
    same = ["torch", "weights_bytes", "encoder_cache"] + (["total_bytes", "used_bytes"] if kind == "npu" else [])
    ages = answer["encoder_cache"], sample["encoder_cache"]
    assert [age.pop("oldest_age_seconds") for age in ages] == [0.0, 0.0]
    assert {name: sample[name] for name in same} == {name: answer[name] for name in same}
    assert set(sample["host_memory"]) == set(answer["host_memory"]) - {"pinned_bytes"}


def test_the_cache_is_read_once_a_second_and_only_after_a_step(bench, readings):
    """A thousand entries take milliseconds, which the engine would miss."""
    bench.cache["a"] = FakeTensor(10)
    for n in range(25):
        bench.clock.now = 100.0 + n / 10
        bench.memory()
    assert len(readings) == 1
    for n in range(25, 45):
        bench.clock.now = 100.0 + n / 10
        bench.step()
        bench.memory()
    assert len(readings) == 3


def test_a_reading_that_takes_long_is_good_for_longer(bench, readings, monkeypatch):
    """A half per cent of the engine's time at most, however many entries there are."""
    spent = Clock()
    watch = encoder_watch.EncoderWatch("npu", bench.state, bench.calls, spent)
    monkeypatch.setattr(encoder_watch, "figures_of", lambda *_: spent.advance(0.009))
    for n in range(5):
        watch.look(bench.worker, 100.0 + n, None, Notes())
    assert len(readings) == 3


@pytest.mark.parametrize("change", ["entry", "dict", "spill"])
def test_what_changes_without_a_step_is_seen(bench, readings, change):
    """A reset, another dict, and what `trim` moved."""
    bench.cache["a"] = FakeTensor(10)
    bench.memory()
    if change == "entry":
        bench.cache.clear()
    elif change == "dict":
        bench.worker.model_runner.encoder_cache = {"b": FakeTensor(10)}
    else:
        bench.state.ledger.spills += 1
    bench.clock.now += 1
    bench.memory()
    assert len(readings) == 2


def test_without_steps_the_cache_is_read_every_second(torch_device, readings):
    """Nobody tells when something changed."""
    torch_device("npu")
    bench = Bench()
    bench.steps.detach(bench.worker)
    for n in range(20):
        bench.clock.now = 100.0 + n / 10
        bench.memory()
    assert len(readings) == 2


def calls_of_a_sample(entries: int) -> int:
    """How many functions are called by a sample that is not the first."""
    bench = Bench(model_runner=fake_runner(encoder_cache={str(n): FakeTensor(10) for n in range(entries)}))
    bench.memory()
    bench.clock.now += 0.1
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    bench.step()
    sys.setprofile(profile)
    try:
        sampler, worker, now = bench.sampler, bench.worker, bench.clock.now
        sampler.memory(worker, now)
        sampler.moving(now)
        sampler.entries(now)
    finally:
        sys.setprofile(None)
    return count


def test_a_sample_does_not_grow_with_the_cache(torch_device):
    """Between two readings, ten thousand entries cost what ten do."""
    torch_device("npu")
    assert calls_of_a_sample(10) == calls_of_a_sample(10_000)


def test_ages_go_on_between_two_readings(bench):
    """The oldest entry's, and those of the list."""
    bench.cache["a"] = FakeTensor(10)
    bench.memory()
    bench.clock.now += 0.5
    assert bench.memory()["encoder_cache"]["oldest_age_seconds"] == 0.5
    total, largest = bench.sampler.entries(bench.clock.now)
    assert (total, largest) == (1, [{"mm_hash": "a", "bytes": 20, "residency": "device", "age_seconds": 0.5}])


def test_the_ten_largest_entries_are_listed(bench):
    """Equal ones by their hash; names are cut, and clean."""
    for n in range(20):
        bench.cache[f"{n:x}" * 200] = FakeTensor(100 - n)
    bench.cache["\ud800"] = FakeTensor(500, device="cpu")
    bench.memory()
    total, largest = bench.sampler.entries(bench.clock.now)
    assert (total, len(largest)) == (21, 10)
    assert (largest[0]["mm_hash"], largest[0]["residency"]) == ("?", "host")
    assert [row["bytes"] for row in largest] == [1000, *range(200, 182, -2)]
    assert {len(row["mm_hash"]) for row in largest[1:]} == {64}


def test_a_text_model_has_no_entries(torch_device):
    """Nothing to list, and null."""
    torch_device("npu")
    bench = Bench(model_runner=fake_runner(encoder_cache=None))
    assert bench.memory()["encoder_cache"] is None
    assert bench.sampler.entries(100.0) is None


def test_nothing_of_the_engines_is_kept(bench):
    """An entry that the engine drops is freed at once, without the garbage collector."""
    bench.cache["a"] = FakeTensor(10)
    dropped = weakref.ref(bench.cache["a"])
    gc.disable()
    try:
        bench.memory()
        bench.moving()
        bench.cache.clear()
        assert dropped() is None
    finally:
        gc.enable()


def test_a_sample_leaves_no_cycles(bench):
    """The collector is not given work: a full run stops the engine for 100 ms."""
    bench.cache["a"] = FakeTensor(10)

    def long_step() -> None:
        bench.clock.now += 5.0
        bench.memory()
        assert bench.moving()["stack"]

    bench.worker.execute_model(long_step)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            bench.worker.execute_model(long_step)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_cache_is_not_looked_at_while_an_operation_runs(bench, readings):
    """`trim` exchanges the dict once nobody else holds it."""
    bench.cache["a"] = FakeTensor(10)
    with bench.calls.running("trim"):
        assert bench.memory()["encoder_cache"] is None
        assert bench.moving()["rpc"] == "trim"
    assert readings == []
    assert bench.memory()["encoder_cache"]["entries"] == 1
    assert bench.moving()["rpc"] is None


def test_the_cache_is_read_again_after_an_operation(bench, readings):
    """By the next sample a remedy is measured on ranks that no call answers for."""
    bench.cache["a"] = FakeTensor(10)
    assert bench.memory()["encoder_cache"]["entries"] == 1
    with bench.calls.running("release"):
        bench.cache.clear()
    bench.clock.now += 0.1
    assert bench.memory()["encoder_cache"]["entries"] == 0
    with bench.calls.running("memory"):
        pass
    bench.clock.now += 0.1
    bench.memory()
    assert len(readings) == 2


def test_an_operation_waits_for_the_end_of_a_reading(bench, monkeypatch):
    """And for no longer than a moment: a thread that was lost in a fork holds it for ever."""
    order = []
    with bench.calls.reading() as may_read:

        def operate() -> None:
            with bench.calls.running("trim"):
                order.append("operation")

        thread = threading.Thread(target=operate)
        thread.start()
        order.append("reading")
    thread.join()
    assert (may_read, order) == (True, ["reading", "operation"])
    monkeypatch.setattr("worker_ext.recorder.calls._READING_SECONDS", 0.0)
    bench.calls._cache.acquire()
    operate()
    assert order == ["reading", "operation", "operation"]


def test_a_step_shows_how_long_it_has_lasted(bench):
    """Without a stack, for a while."""
    seen = []

    def plan() -> None:
        bench.clock.now += 0.25
        seen.append(bench.moving())

    bench.step()
    bench.worker.execute_model(plan)
    assert seen == [
        {
            "steps_begun": 2,
            "steps_ended": 1,
            "step_seconds": 0.25,
            "last_step_mono": 100.0,
            "rpc": None,
            "rpc_seconds": None,
            "stack": None,
        }
    ]
    assert bench.moving()["step_seconds"] is None


def test_what_began_after_the_sample_has_lasted_for_nothing(bench):
    """Not for less than nothing."""
    seen = []

    def plan() -> None:
        with bench.calls.running("hello"):
            seen.append(bench.sampler.moving(bench.clock.now - 0.001))

    bench.worker.execute_model(plan)
    assert [(moving["step_seconds"], moving["rpc_seconds"]) for moving in seen] == [(0.0, 0.0)]


def test_a_step_that_lasts_shows_where_it_is(bench):
    """Eight lines, innermost first, from when it has lasted a second until it ends."""
    stacks = []

    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
            return
        for seconds in (0.9, 0.1):
            bench.clock.now += seconds
            stacks.append(bench.moving()["stack"])

    bench.worker.execute_model(lambda: deeper(9))
    assert stacks[0] is None
    assert [line.partition(" ")[2] for line in stacks[1]][:4] == [
        "stack_of", "<lambda>", "value", "_stack_of_what_lasts",
    ]  # fmt: skip
    assert (len(stacks[1]), stacks[1][-1].partition(":")[0]) == (8, "test_recorder_sampler.py")
    assert bench.moving()["stack"] is None


def test_a_stack_is_looked_for_once_a_second(bench, monkeypatch):
    """And anew for every step that lasts; the samples between show the last one."""
    looks = []
    monkeypatch.setattr(
        "worker_ext.recorder.sampler.stack_of", lambda thread: looks.append(thread) or [str(len(looks))]
    )

    def plan() -> None:
        for _ in range(24):
            bench.clock.now += 0.125
            shown.append(bench.moving()["stack"])

    for steps, expected in ((1, [None] * 7 + [["1"]] * 8 + [["2"]] * 8 + [["3"]]), (2, [None] * 7 + [["4"]] * 8)):
        shown: list[object] = []
        bench.worker.execute_model(plan)
        assert (bench.moving()["steps_ended"], shown[: len(expected)]) == (steps, expected)
    assert set(looks) == {threading.get_ident()}


def test_an_operation_that_lasts_shows_where_it_is(bench):
    """On the thread that runs it."""
    with bench.calls.running("release"):
        bench.clock.now += 1.5
        moving = bench.moving()
    assert (moving["rpc"], moving["rpc_seconds"], len(moving["stack"])) == ("release", 1.5, 8)


def test_the_machine_is_read_once_a_second(bench, monkeypatch):
    """The process's own size every time."""
    reads = []
    host = SimpleNamespace(_replace=lambda **own: SimpleNamespace(_asdict=lambda: own))
    monkeypatch.setattr("worker_ext.recorder.sampler.read_host", lambda notes: reads.append(notes) or host)
    for n in range(15):
        bench.clock.now = 100.0 + n / 10
        assert bench.memory()["host_memory"]["rss_bytes"] > 0
    assert len(reads) == 2


def test_a_kv_cache_is_measured_once_a_second(bench, monkeypatch):
    """A large model has hundreds of layers."""
    reads = []
    monkeypatch.setattr("worker_ext.memory_parts.kv_cache_storages", lambda *args: reads.append(args) or [])
    for n in range(15):
        bench.clock.now = 100.0 + n / 10
        bench.memory()
    assert len(reads) == 2


def test_sleep_modes_allocator_is_not_asked_from_a_thread(torch_device):
    """It calls Python with the lock held that we would wait for with Python's own."""
    module = torch_device("npu")
    bench = Bench()
    bench.worker.vllm_config.model_config = SimpleNamespace(enable_sleep_mode=True)
    assert set(bench.memory()["torch"].values()) == {None}
    assert ("memory_stats", 1) not in module.calls


def test_what_cannot_be_read_is_null_and_costs_nothing_else(bench, monkeypatch):
    """As in `memory`."""

    def fail(*_: object) -> None:
        raise RuntimeError("driver says no")

    for name in ("rss_bytes", "weights_bytes"):
        monkeypatch.setattr(f"worker_ext.recorder.sampler.{name}", fail)
    monkeypatch.setattr(encoder_watch, "read_encoder_outputs", fail)
    sample = bench.memory()
    assert (sample["weights_bytes"], sample["encoder_cache"], sample["host_memory"]["rss_bytes"]) == (None, None, None)
    assert (sample["used_bytes"], sample["kv_cache_bytes"]) == (4_000, 1_600)


def test_a_worker_of_an_unknown_device_is_recorded_too(torch_device):
    """Its host's memory, and whether it moves."""
    bench = Bench()
    bench.sampler.use(None)
    sample = bench.memory()
    assert (sample["total_bytes"], sample["kv_cache_bytes"], sample["encoder_cache"]) == (None, None, None)
    assert sample["host_memory"]["rss_bytes"] > 0
    assert bench.sampler.entries(100.0) is None
