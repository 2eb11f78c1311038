"""A sample has what `memory` has, costs little, keeps nothing, and survives whatever fails."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest

from highwater_worker.devices import device_of, read_host
from highwater_worker.encoder_cache import index as encoder_index
from highwater_worker.encoder_cache.index import EncoderIndex
from highwater_worker.errors import Notes, UnreadableError
from highwater_worker.recorder.reading import Depth, MemoryReader
from highwater_worker.state import state_of
from highwater_worker.wire import ROW
from tests.unit.worker_ext.fakes import HEAD, HOST, FakeModel, FakeStorage, FakeTensor, ask, fake_runner, fake_worker


class Bench:
    """A sampler beside its worker, on clocks that the test moves."""

    def __init__(self, kind: str = "npu", **attributes: object) -> None:
        self.now, self.changes = 100.0, 0
        self.worker = fake_worker(kind, None if kind == "cpu" else 1, **attributes)
        self.cache: dict[str, object] = self.worker.model_runner.encoder_cache
        self.sampler = MemoryReader()
        self.sampler.host = read_host(Notes())

    def memory(self, *, in_full: bool = False) -> dict[str, object]:
        return self.sampler.read(self.worker, Depth.FULL if in_full else Depth.STEP, self.now, self.changes)


@pytest.fixture
def bench(torch_device):
    torch_device("npu")
    return Bench()


@pytest.mark.parametrize("kind", ["npu", "cpu"])
def test_a_sample_has_what_memory_answers(kind, torch_device):
    torch_device("npu")
    cache = {"a": FakeTensor(50, device=kind), "b": FakeTensor(5, device=kind)}
    runner = fake_runner(kind, encoder_cache=cache, get_model=lambda: FakeModel(device=kind))
    bench = Bench(kind, model_runner=runner)
    answer, sample = ask(bench.worker, "memory"), bench.memory()
    assert "releasable_bytes" in sample
    elsewhere = {"device", "budget", "notes", *HEAD}  # in the file's head, and in that of its table
    assert set(answer) - set(sample) == elsewhere | {"kv_cache_reserved_bytes", "elapsed_ms"}
    same = ["torch", "weights_bytes", "encoder_cache", "asleep_tags"] + (
        ["total_bytes", "used_bytes"] if kind == "npu" else []
    )
    ages = answer["encoder_cache"], sample["encoder_cache"]
    assert [age.pop("oldest_age_seconds") for age in ages] == [0.0, 0.0]
    assert {name: sample[name] for name in same} == {name: answer[name] for name in same}
    assert set(sample["host_memory"]) == set(answer["host_memory"])


def test_pinned_host_memory_is_sampled(torch_device):
    """As torch tells it, for spilled entries lie there."""
    torch_device("npu").host_memory_stats = lambda: {"allocated_bytes.current": 4096}
    bench = Bench()
    assert bench.memory()["host_memory"]["pinned_bytes"] == 4096
    assert ask(bench.worker, "memory")["host_memory"]["pinned_bytes"] == 4096


def test_a_kv_cache_is_measured_every_ten_seconds(bench, monkeypatch):
    reads = []
    monkeypatch.setattr("highwater_worker.memory.storages.kv_cache_storages", lambda *args: reads.append(args) or [])
    for n in range(150):
        bench.now = 100.0 + n / 10
        bench.memory()
    assert len(reads) == 2


def test_a_sleep_shows_in_the_next_whole_sample(bench):
    state_of(bench.worker).sleep.is_complete = True
    assert bench.memory(in_full=True)["asleep_tags"] == []
    state_of(bench.worker).sleep.tags = {"kv_cache"}
    assert bench.memory()["asleep_tags"] == []
    assert bench.memory(in_full=True)["asleep_tags"] == ["kv_cache"]
    state_of(bench.worker).sleep.tags = set()
    bench.now += 11.0
    assert bench.memory()["asleep_tags"] == []


def test_what_cannot_be_read_is_noted_where_everything_was_read(bench, monkeypatch):
    monkeypatch.setattr(
        "highwater_worker.memory.storages.kv_cache_storages", lambda *_: (_ for _ in ()).throw(RuntimeError("no"))
    )
    bench.memory(in_full=True)
    noted = {"name": "kv_cache_bytes", "reason": "RuntimeError: no"}
    assert noted in bench.sampler.notes
    bench.now += 1.0
    bench.memory()
    assert noted in bench.sampler.notes


@pytest.mark.parametrize(
    ("kind", "in_full", "reads"), [("npu", False, 0), ("npu", True, 1), ("cpu", False, 1), ("cpu", True, 1)]
)
def test_between_two_steps_a_devices_sample_reads_no_resident_size(kind, in_full, reads, torch_device, monkeypatch):
    """Each of its system calls lets go of Python's lock; the other thread has read it a second ago at most."""
    torch_device("npu")
    calls = []
    monkeypatch.setattr("highwater_worker.recorder.reading.rss_bytes", lambda: calls.append(1) or 7)
    bench = Bench(kind)
    known = bench.sampler.host.rss_bytes
    sample = bench.memory(in_full=in_full)
    assert (len(calls), sample["host_memory"]["rss_bytes"]) == (reads, 7 if reads else known)


def test_a_worker_of_an_unknown_device_is_recorded_too(torch_device):
    torch_device("npu")
    bench = Bench()
    device, bench.worker.device = bench.worker.device, SimpleNamespace(type="tpu", index=0)
    sample = bench.memory()
    assert (sample["total_bytes"], sample["kv_cache_bytes"], sample["encoder_cache"]) == (None, None, None)
    assert sample["host_memory"]["rss_bytes"] > 0
    bench.worker.device = device
    assert bench.memory()["total_bytes"] == 5_000


def test_nothing_of_the_engines_is_kept(bench):
    bench.cache["a"] = FakeTensor(10)
    dropped = weakref.ref(bench.cache["a"])
    gc.disable()
    try:
        bench.memory()
        bench.cache.clear()
        assert dropped() is None
    finally:
        gc.enable()


def test_a_sample_leaves_no_cycles(bench):
    """The collector is not given work: a full run stops the engine for 100 ms."""
    bench.memory(in_full=True)
    gc.collect()
    gc.disable()
    try:
        for n in range(5):
            bench.now, bench.changes = bench.now + 1, n
            bench.cache[str(n)] = FakeTensor(10)
            bench.memory(in_full=True)
        bench.cache.clear()
        bench.memory(in_full=True)
        before = gc.collect()
        assert before <= 5, "cycles of the stand-in tensors alone"
    finally:
        gc.enable()


# --- the encoder cache, entry by entry ---


class Index:
    """An index beside its worker; `cost` is what reading one entry takes."""

    def __init__(self, worker: object, cost: float = 0.0) -> None:
        self.worker, self.cost, self.now, self.spent = worker, cost, 100.0, 0.0
        self.index = EncoderIndex(device_of(worker), lambda: self.spent)
        self.changes: object = 0
        self.reads: list[str] = []

    @property
    def cache(self) -> dict[str, object]:
        return self.worker.model_runner.encoder_cache  # not kept: `trim` exchanges it once nobody else holds it

    @cache.setter
    def cache(self, cache: dict[str, object]) -> None:
        self.worker.model_runner.encoder_cache = cache

    def look(self, *, in_full: bool = False) -> dict[str, object] | None:
        self.index.update(self.worker, self.now, self.changes, HOST, in_full=in_full)
        return self.figures()

    def figures(self) -> dict[str, object] | None:
        return self.index.figures(self.worker)

    def rows(self) -> list[tuple[str, int, float, int]]:
        return [(name.rstrip(b"\0").decode(), *rest) for name, *rest in ROW.iter_unpack(self.index.table()[1])]


@pytest.fixture
def index(monkeypatch, torch_device):
    torch_device("npu")
    index, read = Index(fake_worker()), encoder_index.read_entry

    def counted(cache, key, value):
        index.reads.append(key)
        index.spent += index.cost
        return read(cache, key, value)

    monkeypatch.setattr(encoder_index, "read_entry", counted)
    return index


def test_every_entry_has_a_row(index):
    index.cache |= {"a" * 99: FakeTensor(10), "\ud800\x1b": FakeTensor(500, device="cpu")}
    figures = index.look()
    index.now = 101.0
    assert index.rows() == [("a" * 64, 20, 100.0, 0), ("?\x1b", 1000, 100.0, 1)]
    assert (figures["entries"], figures["device_bytes"], figures["host_bytes"]) == (2, 20, 1000)
    assert (figures["host_entries"], index.look()["oldest_age_seconds"]) == (1, 1.0)


def test_an_entry_is_read_once(index):
    index.cache |= {"a": FakeTensor(10), "b": FakeTensor(10)}
    for n in range(5):
        index.now, index.changes = 100.0 + n, n
        index.look()
    assert index.reads == ["a", "b"]


def test_an_entry_made_anew_under_its_name_is_another(index):
    index.cache["a"] = FakeTensor(10)
    index.look()
    index.now, index.changes = 105.0, 1
    index.cache["a"] = FakeTensor(30)
    assert index.look()["device_bytes"] == 60
    assert index.rows() == [("a", 60, 105.0, 0)]


def test_one_that_went_to_the_host_and_came_back_is_as_old_as_it_was(torch_device):
    torch_device("npu")
    cache = {name: FakeTensor(10) for name in "ab"}
    index = Index(fake_worker(model_runner=fake_runner(encoder_cache=cache)))
    index.look()
    for op, on_host in (("trim", 1), ("restore", 0)):
        ask(index.worker, op)
        index.now, index.changes = index.now + 5.0, op
        assert index.look(in_full=True)["host_entries"] == 2 * on_host
        assert index.rows() == [("a", 20, 100.0, on_host), ("b", 20, 100.0, on_host)]


def test_storages_that_entries_share_count_once(index):
    shared = FakeStorage(1000)
    index.cache |= {name: FakeTensor(10, storage=shared) for name in "abc"}
    assert index.look()["device_bytes"] == 1000
    for left, expected in (("bc", 1000), ("c", 1000), ("", 0)):
        for name in set(index.cache) - set(left):
            del index.cache[name]
        assert index.look(in_full=True) is not None
        index.now, index.changes = index.now + 1, left
        assert index.look(in_full=True)["device_bytes"] == expected


def test_an_address_that_is_used_again_counts_by_its_new_size(index):
    """The row of what was there before may still be there."""
    index.cache["a"] = FakeTensor(10, storage=FakeStorage(1000, pointer=4096))
    index.look()
    index.changes = 1
    del index.cache["a"]
    index.cache["b"] = FakeTensor(10, storage=FakeStorage(300, pointer=4096))
    assert index.look(in_full=True)["device_bytes"] == 300


def test_a_large_cache_is_read_in_slices(index):
    """Half a millisecond each, a 500th of the engine's thread; figures come with the last of them."""
    index.cost = 0.00001
    index.cache |= {str(n): FakeTensor(10) for n in range(200)}
    looks = 0
    while index.look() is None:
        looks += 1
        before = index.spent
        index.now += 0.01
        index.look()
        assert index.spent == before, "it rests"
        assert before <= looks * 0.0007
        index.now += 0.35
    assert (looks > 2, index.figures()["entries"], len(index.rows())) == (True, 200, 200)
    assert len(index.reads) == 200


def test_what_goes_and_comes_between_two_slices_is_right_in_the_end(index):
    index.cost = 0.0001
    index.cache |= {str(n): FakeTensor(10) for n in range(40)}
    assert index.look() is None
    del index.cache["0"]
    index.cache["39"] = FakeTensor(20)
    index.worker.model_runner.encoder_cache = dict(list(index.cache.items())[:-10])
    index.changes = 1
    for _ in range(9):
        index.now += 2.0
        index.look()
    assert index.figures()["entries"] == 29
    assert {name for name, *_ in index.rows()} == {str(n) for n in range(1, 30)}


def test_after_an_operation_of_ours_all_is_read_at_once(index):
    index.cost = 0.01
    index.cache |= {str(n): FakeTensor(10) for n in range(100)}
    assert index.look() is None
    assert index.look(in_full=True)["entries"] == 100
    index.cache.clear()
    index.changes = 1
    assert index.look(in_full=True)["entries"] == 0


def test_the_cache_is_looked_through_once_a_second_and_only_after_a_change(index, monkeypatch):
    passes, keys = [], encoder_index.find_encoder_cache
    monkeypatch.setattr(encoder_index, "find_encoder_cache", lambda worker: passes.append(1) or keys(worker))
    index.cache["a"] = FakeTensor(10)
    for change, expected in ((lambda _: 5, 1), (lambda n: n, 3), (lambda _: None, 3)):
        passes.clear()
        index.now += 5.0
        for n in range(25):
            index.now, index.changes = index.now + 0.1, change(n)
            index.look()
        assert len(passes) == expected


def test_a_table_is_new_when_entries_came_or_went(index):
    index.cache["a"] = FakeTensor(10)
    index.look()
    assert index.index.is_new
    index.rows()
    index.now, index.changes = 101.5, 1
    index.look()
    assert not index.index.is_new
    index.cache["b"] = FakeTensor(10)
    index.now, index.changes = 103.0, 2
    index.look()
    assert index.index.is_new


def test_a_table_has_no_more_than_its_rows(index):
    tensor = FakeTensor(10)
    index.cache |= dict.fromkeys(map(str, range(5000)), tensor)
    index.look(in_full=True)
    total, rows = index.index.table()
    assert (total, len(rows)) == (5000, 4096 * 88)


@pytest.mark.parametrize("what", ["gone", "unreadable"])
def test_a_cache_that_is_not_there_any_more_has_no_figures(index, what):
    index.cache["a"] = FakeTensor(10)
    index.look()
    index.worker.model_runner.encoder_cache = None if what == "gone" else SimpleNamespace(encoder_outputs=[])
    index.now, index.changes = 102.0, 1
    if what == "gone":
        index.look()
    else:
        with pytest.raises(UnreadableError):
            index.look()
    assert (index.figures(), index.rows(), index.index.is_new) == (None, [], False)


def calls_of_a_sample(entries: int) -> int:
    """How many functions are called by a sample that is not the first."""
    bench = Bench(model_runner=fake_runner(encoder_cache={str(n): FakeTensor(10) for n in range(entries)}))
    bench.memory(in_full=True)
    bench.now, bench.changes = bench.now + 0.1, 1
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        bench.memory()
    finally:
        sys.setprofile(None)
    return count


def test_a_sample_does_not_grow_with_the_cache(torch_device):
    torch_device("npu")
    assert calls_of_a_sample(10) == calls_of_a_sample(10_000)
