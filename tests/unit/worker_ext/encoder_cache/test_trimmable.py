"""`trimmable_bytes` says beforehand what `trim` does, in an answer and in a sample alike, and moves nothing."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from highwater_worker.devices import HostMemory, device_of
from highwater_worker.encoder_cache.index import EncoderIndex
from tests.unit.worker_ext.fakes import FakeStorage, FakeTensor, ask, fake_runner, fake_worker, in_a_thread
from tests.unit.worker_ext.operations.test_trim import REFUSED, batch, request, tensors, trim, worker_with


def host(available: int = 1 << 30) -> HostMemory:
    return HostMemory(1, 0, None, 1 << 40, available)


@pytest.fixture(autouse=True)
def npu(torch_device, monkeypatch):
    for module in ("encoder_cache.mover", "recorder.reading"):
        monkeypatch.setattr(f"highwater_worker.{module}.read_host", lambda _notes: host())
    return torch_device("npu")


def told(worker) -> int | None:
    """What `memory` says; a sample says the same."""
    answer = ask(worker, "memory")["trimmable_bytes"]
    assert sampled(worker) == answer
    return answer


def sampled(worker, available: int = 1 << 30) -> int | None:
    index = EncoderIndex(device_of(worker))
    index.update(worker, 100.0, 0, host(available), in_full=True)
    return index.trimmable_bytes


def gained(worker, **payload) -> int:
    """What the device really gains by a trim; a block that was kept and is not needed any more comes on top."""
    before = reserve(worker)
    spilled = trim(worker, **payload)["spilled_bytes"]
    return max(0, spilled - max(0, reserve(worker) - before))


def reserve(worker) -> int:
    return ask(worker, "memory")["encoder_cache"]["restore_reserve_bytes"]


def test_it_is_what_a_trim_then_gives_less_the_way_back():
    """Four of 100 bytes, one of them needed: three go, and a block of 100 is kept."""
    worker = worker_with(tensors(), requests=request("b"))
    assert told(worker) == 200
    assert gained(worker) == 200
    assert told(worker) == 0, "nothing is left that nobody needs"


def test_views_of_one_storage_go_together_or_not_at_all():
    worker = worker_with({**batch("ab"), **batch("cd"), **tensors("e")}, requests=request("c"))
    assert told(worker) == 1000 + 100 - 1000
    assert gained(worker) == 100


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({}, 0),
        (tensors("a"), 0),
        ({"a": FakeTensor(50, device="cpu")}, 0),
        ({**tensors("ab"), "c": [FakeTensor(50)]}, 100),
        ({**tensors("ab"), "c": FakeTensor(0)}, 100),
    ],
    ids=["empty", "one storage, which would be kept", "on the host", "one that cannot go", "one of no bytes"],
)
def test_what_a_trim_could_not_move_does_not_count(cache, expected):
    worker = worker_with(dict(cache))  # the test's own would be held by pytest as well
    assert told(worker) == expected
    assert gained(worker) == expected


def test_a_text_model_has_nothing_to_trim():
    assert told(fake_worker(model_runner=fake_runner(encoder_cache=None))) == 0


def test_a_cpu_worker_tells_what_would_go():
    worker = worker_with({name: FakeTensor(50, device="cpu") for name in "ab"}, kind="cpu")
    assert told(worker) == 200
    assert gained(worker) == 200


@pytest.mark.parametrize(("available", "expected"), [(1 << 30, 300), (1100, 100), (600, 0), (0, 0)])
def test_no_more_goes_than_the_host_has_room_for(monkeypatch, available, expected):
    """Half of what it has, for two ranks of one machine; a pinned copy of 100 bytes takes 128, and two fit into 275."""
    worker = worker_with(tensors())
    worker.vllm_config.parallel_config.local_world_size = 2
    monkeypatch.setattr("highwater_worker.recorder.reading.read_host", lambda _notes: host(available))
    assert ask(worker, "memory")["trimmable_bytes"] == sampled(worker, available) == expected


def test_the_budget_of_the_last_trim_holds():
    worker = worker_with(tensors("abcdef"))
    trim(worker, free_bytes=1, host_budget_bytes=400)
    assert told(worker) == 100, "two lie there, one more may; the way back is there already"


def test_a_host_that_cannot_be_read_leaves_it_unknown(monkeypatch):
    """A trim would be refused."""
    unknown = HostMemory(None, None, None, None, None)
    for module in ("encoder_cache.mover", "recorder.reading"):
        monkeypatch.setattr(f"highwater_worker.{module}.read_host", lambda _notes: unknown)
    assert ask(worker_with(tensors()), "memory")["trimmable_bytes"] is None


@pytest.mark.parametrize(("make", "_reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_null_where_a_trim_would_be_refused(make, _reason):
    worker = make()
    kind = type(worker.model_runner.encoder_cache)
    answer = ask(worker, "memory")
    assert answer["trimmable_bytes"] is None
    assert "trimmable_bytes" not in [note["name"] for note in answer["notes"]]
    assert sampled(worker) is None
    assert type(worker.model_runner.encoder_cache) is kind


def test_a_sleeping_engine_has_nothing_that_may_be_touched():
    worker = worker_with(tensors())
    worker._sleep_mode_backend = SimpleNamespace(_state="SUSPENDED")
    assert told(worker) is None
    worker._sleep_mode_backend._state = "RUNNING"
    assert told(worker) == 300


def test_another_thread_cannot_tell():
    """Under Ray's first executor; a trim would be refused there."""
    worker = worker_with(tensors())
    assert in_a_thread(lambda: ask(worker, "memory"))["trimmable_bytes"] is None


def test_who_else_holds_the_cache_is_not_searched_for(monkeypatch):
    """A search walks every object: null then, and once the cache is ours nobody's hold matters."""
    worker = worker_with(tensors())
    holder = [worker.model_runner.encoder_cache]
    monkeypatch.setattr("gc.get_referrers", lambda *_: pytest.fail("it searched"))
    assert told(worker) is None
    holder.clear()
    assert told(worker) == 300
    trim(worker, free_bytes=0)
    holder.append(worker.model_runner.encoder_cache)
    assert told(worker) == 300


def test_nothing_is_moved_and_nothing_put_in_place():
    worker = worker_with(tensors())
    assert told(worker) == 300
    assert type(worker.model_runner.encoder_cache) is dict
    assert list(worker.model_runner.encoder_cache) == list("abcd")


def test_a_runner_that_does_not_tell_what_is_needed_holds_nothing_back():
    worker = worker_with(tensors(), requests=None)
    assert told(worker) == 300
    assert gained(worker) == 300


@pytest.mark.parametrize("seed", range(40))
def test_answer_sample_and_trim_agree_on_any_cache(seed):
    """Shared storages, needed entries, ones that cannot go, some moved before; the sample's index saw them come and go.

    Where the host has room: which of them fit is a matter of their order, which a sample does not keep.
    """
    draw = random.Random(seed)  # noqa: S311 - nothing secret: the same caches every time
    worker = worker_with({}, requests={})
    index = EncoderIndex(device_of(worker))
    names = [f"e{number}" for number in range(12)]
    shared: list[FakeStorage] = []
    for turn in range(6):
        cache = worker.model_runner.encoder_cache
        for name in draw.sample(names, 5):
            if name in cache:
                del cache[name]
                continue
            if draw.random() < 0.4 and shared:
                storage = draw.choice(shared)
            else:
                storage = FakeStorage(draw.choice([100, 200, 1000]))
                shared.append(storage)
            tensor = FakeTensor(50, content=name, storage=storage)
            cache[name] = [tensor] if draw.random() < 0.15 else tensor
        del cache
        shared.clear()  # an address is used again, if at all, by another storage
        worker.model_runner.requests = request(*draw.sample(names, draw.randint(0, 3)))
        if draw.random() < 0.5:
            trim(worker, free_bytes=draw.choice([0, 100, 500]))
        index.update(worker, 100.0 + 10 * turn, turn, host(), in_full=True)
        assert index.trimmable_bytes == told(worker)
    expected = told(worker)
    assert gained(worker) == expected


def test_it_costs_no_more_where_nothing_came_or_went(monkeypatch):
    calls, real = [], EncoderIndex._trimmable
    monkeypatch.setattr(EncoderIndex, "_trimmable", lambda *args: calls.append(1) or real(*args))
    worker = worker_with(tensors())
    index = EncoderIndex(device_of(worker), cost_clock=lambda: 0.0)
    for tick in range(50):
        index.update(worker, 100.0 + tick / 10, tick, host(), in_full=False)
    assert (index.trimmable_bytes, 4 <= len(calls) <= 6) == (300, True)
    assert json.dumps(index.trimmable_bytes)
