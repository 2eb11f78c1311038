"""`encoder_cache` lists what is cached, counts shared memory once, and touches nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from highwater_worker.encoder_cache import index as encoder_index
from highwater_worker.encoder_cache.spilling_dict import read_entries
from highwater_worker.engine_view import encoder_cache_place
from highwater_worker.operations import encoder_cache
from tests.unit.worker_ext.fakes import FakeStorage, FakeTensor, ask, fake_runner, fake_worker, wanted


class EmptyIsFalsy:
    """V2's EncoderCache: it has a length, so an empty one is falsy (vllm/v1/worker/gpu/mm/encoder_cache.py)."""

    def __init__(self, outputs):
        self.encoder_outputs = outputs
        self.mm_features = {}

    def __len__(self):
        return len(self.encoder_outputs)


class RestoresAtAccess(dict):
    """A dict that would bring everything back to the device when read."""

    def items(self):
        raise AssertionError("read through the overridden method")

    __iter__ = __len__ = __getitem__ = get = items


def worker_with(cache, **runner):
    return fake_worker(model_runner=fake_runner(encoder_cache=cache, **runner))


@pytest.fixture(autouse=True)
def npu(torch_device):
    torch_device("npu")


def test_an_entry_is_told_in_full():
    answer = ask(worker_with({"abc": FakeTensor(256, 64)}), "encoder_cache")
    assert answer["present"] is True
    assert answer["entries"] == [
        {
            "mm_hash": "abc",
            "shape": [256, 64],
            "dtype": "bfloat16",
            "bytes": 32_768,
            "storage_bytes": 32_768,
            "shared_with": 0,
            "age_seconds": 0.0,
            "idle_seconds": None,
            "residency": "device",
            "referenced": False,
        }
    ]
    totals = {key: answer[key] for key in ("entries_total", "storages", "device_bytes", "host_bytes")}
    assert totals == {"entries_total": 1, "storages": 1, "device_bytes": 32_768, "host_bytes": 0}
    assert answer["capacity_embeds"] == 16384
    assert (answer["spills"], answer["restores"], answer["restore_seconds"]) == (0, 0, 0.0)


def test_views_of_one_storage_count_once():
    batch = FakeStorage(600)
    views = {name: FakeTensor(100, storage=batch) for name in "abc"}
    answer = ask(worker_with(views), "encoder_cache")
    assert (answer["storages"], answer["device_bytes"]) == (1, 600)
    assert {(row["bytes"], row["storage_bytes"], row["shared_with"]) for row in answer["entries"]} == {(200, 600, 2)}


def test_what_lies_in_host_memory_counts_apart():
    cache = {
        "near": FakeTensor(100, storage=FakeStorage(200, pointer=4096)),
        "far": FakeTensor(50, device="cpu", storage=FakeStorage(100, pointer=4096)),
    }
    answer = ask(worker_with(cache), "encoder_cache")
    assert (answer["device_bytes"], answer["host_bytes"], answer["storages"]) == (200, 100, 2)
    assert {row["mm_hash"]: row["residency"] for row in answer["entries"]} == {"near": "device", "far": "host"}


def test_reading_does_not_restore_what_was_spilled():
    """The dict may be a subclass that brings entries back at access."""
    answer = ask(worker_with(RestoresAtAccess(a=FakeTensor(5, device="cpu"))), "encoder_cache")
    assert answer["entries"][0]["residency"] == "host"


@pytest.mark.parametrize("outputs", [{}, {"a": FakeTensor(5)}])
def test_runner_v2_keeps_its_outputs_one_deeper(outputs):
    worker = worker_with(EmptyIsFalsy(outputs), mm_budget=None)
    answer = ask(worker, "encoder_cache")
    # It keeps no budget: a step alone would be too little where one item is larger.
    assert (answer["present"], answer["entries_total"], answer["capacity_embeds"]) == (True, len(outputs), None)
    place = encoder_cache_place(worker)
    assert place is not None
    assert (place.owner, place.kind) == (worker.model_runner.encoder_cache, "encoder_outputs")


def test_a_model_without_one_says_so():
    answer = ask(worker_with(None), "encoder_cache")
    assert (answer["present"], answer["entries"], answer["capacity_embeds"]) == (False, [], None)


def test_values_that_are_not_one_tensor_are_counted():
    """Profiling puts dicts in, some models lists; whatever else is there takes no device memory."""
    shared = FakeTensor(10)
    cache = {"dict": {"x": FakeTensor(10), "y": [shared]}, "pair": (shared, shared), "none": None, 7: "text"}
    answer = ask(worker_with(cache), "encoder_cache")
    rows = {row["mm_hash"]: (row["shape"], row["bytes"], row["storage_bytes"]) for row in answer["entries"]}
    assert rows == {"dict": (None, 40, 40), "pair": (None, 40, 20), "none": (None, 0, 0), "7": (None, 0, 0)}
    assert answer["device_bytes"] == 40


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_a_tensor_without_a_storage_counts_with_its_elements(error, monkeypatch):
    """Some subclasses of torch's have none of their own."""

    def fail(_: object) -> None:
        raise error

    tensor = FakeTensor(10)
    monkeypatch.setattr(tensor, "untyped_storage", fail.__get__(tensor))
    assert ask(worker_with({"a": tensor}), "encoder_cache")["device_bytes"] == 20


def test_the_largest_come_first_and_the_limit_holds():
    worker = worker_with({str(size): FakeTensor(size) for size in (3, 9, 6)})
    answer = ask(worker, "encoder_cache", '{"limit": 2}')
    assert [row["mm_hash"] for row in answer["entries"]] == ["9", "6"]
    assert answer["entries_total"] == 3
    assert ask(worker, "encoder_cache", '{"limit": 0}')["entries"] == []


def test_ages_count_from_the_first_call_that_saw_the_entry(monkeypatch):
    """A lower bound: nothing in the engine records when an entry was made."""
    cache = {"old": FakeTensor(1)}
    worker = worker_with(cache)
    now = 1000.0
    monkeypatch.setattr("highwater_worker.encoder_cache.index.time.monotonic", lambda: now)
    ask(worker, "encoder_cache")
    now += 5
    cache["young"] = FakeTensor(100)
    answer = ask(worker, "encoder_cache", '{"sort": "age"}')
    assert [(row["mm_hash"], row["age_seconds"]) for row in answer["entries"]] == [("old", 5.0), ("young", 0.0)]
    assert ask(worker, "memory")["encoder_cache"]["oldest_age_seconds"] == 5.0


def test_v1_needs_an_entry_until_its_request_has_computed_past_it():
    requests = {
        "r1": SimpleNamespace(mm_features=wanted("a", "b"), num_computed_tokens=10),
        "r2": SimpleNamespace(mm_features=None, num_computed_tokens=0),
    }
    answer = ask(worker_with(dict.fromkeys("abc"), requests=requests), "encoder_cache")
    assert {row["mm_hash"]: row["referenced"] for row in answer["entries"]} == {"a": False, "b": True, "c": False}


def test_v2_needs_an_entry_until_its_request_has_computed_past_it():
    cache = EmptyIsFalsy(dict.fromkeys("abc"))
    cache.mm_features = {"r1": wanted("a", "b"), "r2": wanted("c")}
    states = SimpleNamespace(req_id_to_index={"r1": 1}, num_computed_prefill_tokens=[0, 10])
    answer = ask(worker_with(cache, requests=None, req_states=states), "encoder_cache")
    assert {row["mm_hash"]: row["referenced"] for row in answer["entries"]} == {"a": False, "b": True, "c": True}


def test_references_are_null_where_the_runner_does_not_tell():
    """Not false: that would read as permission."""
    answer = ask(worker_with({"a": FakeTensor(1)}, requests=None), "encoder_cache")
    assert answer["entries"][0]["referenced"] is None


def test_an_entry_that_leaves_during_the_call_is_still_listed(monkeypatch):
    """Under Ray's compiled graphs a step runs beside the call: its age is then unknown, and 0."""
    worker = fake_worker("cpu")
    worker.model_runner.encoder_cache.update(stays=FakeTensor(5, 5), leaves=FakeTensor(5, 5))

    def read_then_lose(of):
        entries = read_entries(of)
        del of.model_runner.encoder_cache["leaves"]
        return entries

    monkeypatch.setattr(encoder_cache, "read_entries", read_then_lose)
    for sort in ("age", "bytes"):
        worker.model_runner.encoder_cache["leaves"] = FakeTensor(5, 5)
        answer = ask(worker, "encoder_cache", f'{{"sort": "{sort}"}}')
        assert answer["ok"]
        assert {entry["mm_hash"] for entry in answer["entries"]} >= {"stays", "leaves"}


def test_a_model_without_one_needs_no_readable_requests():
    """There is no entry that a request could need."""

    class Runner:
        encoder_cache = None

        @property
        def requests(self):
            raise RuntimeError("no requests")

    answer = ask(fake_worker("cpu", model_runner=Runner()), "encoder_cache")
    assert (answer["ok"], answer["present"]) == (True, False)


def test_an_entry_without_storages_gets_older(monkeypatch):
    """It cannot be referenced weakly, and has no storage to be known by."""
    now = [1000.0]
    monkeypatch.setattr(encoder_index.time, "monotonic", lambda: now[0])
    worker = fake_worker("cpu")
    worker.model_runner.encoder_cache["empty"] = ()
    ask(worker, "encoder_cache")
    now[0] += 7.0
    (entry,) = ask(worker, "encoder_cache")["entries"]
    assert entry["age_seconds"] == 7.0
