"""`trim` moves what was not used for longest to host memory, and refuses where that might end the engine."""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from collections import deque
from types import ModuleType, SimpleNamespace

import pytest

from highwater_worker.encoder_cache.spilling_dict import Spilled, SpillingDict
from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import (
    HOST,
    FakeStorage,
    FakeTensor,
    ask,
    fake_runner,
    fake_worker,
    in_a_thread,
    refusal,
    wanted,
)


@pytest.fixture(autouse=True)
def npu(torch_device, monkeypatch):
    monkeypatch.setattr("highwater_worker.encoder_cache.mover.read_host", lambda _notes: HOST)
    return torch_device("npu")


def tensors(names="abcd", elements=50):
    """Tensors of 100 bytes each, on storages of their own; what is in them is their name."""
    return {name: FakeTensor(elements, content=name) for name in names}


def batch(names, nbytes=1000, elements=50):
    """Views of one storage."""
    storage = FakeStorage(nbytes)
    return {name: FakeTensor(elements, content=name, storage=storage) for name in names}


def worker_with(cache, kind="npu", **runner):
    return fake_worker(
        kind, None if kind == "cpu" else 1, model_runner=fake_runner(kind, encoder_cache=cache, **runner)
    )


def trim(worker, **payload):
    return ask(worker, "trim", json.dumps(payload))


def spilled(worker):
    """The keys whose values lie in host memory."""
    cache = worker.model_runner.encoder_cache
    return [key for key, value in dict.items(cache) if type(value) is Spilled]


def kept(answer):
    return tuple(answer["kept"].values())


def request(*names, computed=0):
    return {"r": SimpleNamespace(mm_features=wanted(*names), num_computed_tokens=computed)}


def test_everything_that_nobody_needs_goes(npu):
    worker = worker_with(tensors(), requests=request("b", "c", computed=10))
    answer = trim(worker)
    assert (answer["kind"], answer["asked_bytes"]) == ("dict", None)
    assert (answer["spilled_entries"], answer["spilled_bytes"]) == (3, 300)
    assert kept(answer) == (1, 0, 0)
    assert spilled(worker) == ["a", "b", "d"]
    assert answer["encoder_cache"]["device_bytes"] == 100
    assert answer["encoder_cache"]["host_bytes"] == answer["host_bytes_added"]
    assert (answer["encoder_cache"]["spills"], answer["encoder_cache"]["host_entries"]) == (3, 3)
    assert answer["copy_seconds"] >= 0


def test_the_engine_gets_every_entry_back_from_where_it_was(npu):
    worker = worker_with(tensors())
    trim(worker)
    cache = worker.model_runner.encoder_cache
    assert [(key, value.content, value.device.type) for key, value in cache.items()] == [
        (name, name, "npu") for name in "abcd"
    ]
    block = ask(worker, "memory")["encoder_cache"]
    assert (block["spills"], block["restores"], block["device_bytes"], block["host_bytes"]) == (4, 4, 400, 0)
    assert block["restore_seconds"] > 0


def test_the_device_is_waited_for_once_before_the_first_copy(npu):
    """A step that is under way may still read what is about to be let go. The last call makes the reserve."""
    trim(worker_with(tensors()))
    assert npu.calls == [("synchronize", 1), *[("copy", ("npu", "cpu"))] * 4, ("block", 100)]


def test_nothing_to_move_waits_for_nothing(npu):
    """A call that finds nothing costs the engine next to nothing."""
    trim(worker_with(tensors()), free_bytes=0)
    trim(worker_with(tensors()), keep_bytes=400)
    trim(worker_with(tensors()), idle_seconds=60)
    assert npu.calls == []


@pytest.mark.parametrize(
    ("payload", "asked", "expected"),
    [
        ({"free_bytes": 1}, 1, "ab"),
        ({"free_bytes": 100}, 100, "ab"),
        ({"free_bytes": 150}, 150, "abc"),
        ({"free_bytes": 10_000}, 10_000, "abcd"),
        ({"keep_bytes": 150}, 250, "abc"),
        ({"keep_bytes": 0}, 400, "abcd"),
        ({"keep_bytes": 400}, 0, ""),
        ({"free_bytes": None, "keep_bytes": 300, "idle_seconds": None, "host_budget_bytes": None}, 100, "a"),
    ],
)
def test_bytes_go_until_the_target_is_met(payload, asked, expected):
    """Oldest first where nobody used any. What is kept for the way back, here 100 bytes, is no byte let go."""
    worker = worker_with(tensors())
    answer = trim(worker, **payload)
    assert answer["asked_bytes"] == asked
    assert "".join(spilled(worker)) == expected


def test_what_was_used_last_goes_last():
    worker = worker_with(tensors())
    trim(worker, free_bytes=0)
    cache = worker.model_runner.encoder_cache
    cache["e"] = FakeTensor(50)
    cache.get("a")
    for expected in ("bc", "bcd", "bcde", "abcde"):
        trim(worker, free_bytes=100)
        assert sorted(spilled(worker)) == list(expected)


def test_needed_entries_go_last_and_only_for_bytes():
    """For bytes the device matters more: what is needed comes back."""
    worker = worker_with(tensors(), requests=request("a", "c"))
    trim(worker, free_bytes=0)
    for name in "bd":  # were used later, and are needed no more
        worker.model_runner.encoder_cache.get(name)
    answer = trim(worker, free_bytes=200)
    assert (spilled(worker), kept(answer)) == (["a", "b", "d"], (0, 0, 0))


def test_unknown_needs_hold_nothing_back_and_are_named():
    worker = worker_with(tensors(), requests=None)
    answer = trim(worker)
    assert (answer["spilled_entries"], answer["kept"]["needed_entries"]) == (4, None)
    assert [note["name"] for note in answer["notes"]] == ["kept.needed_entries"]


def test_only_what_was_idle_for_long_enough_goes():
    worker = worker_with(tensors(), requests=request("b"))
    assert trim(worker, idle_seconds=60)["spilled_entries"] == 0
    cache, now = worker.model_runner.encoder_cache, [0.0]
    cache._since, cache._clock = 0.0, lambda: now[0]
    now[0] = 50
    cache.get("c")
    now[0] = 70
    answer = trim(worker, idle_seconds=60)
    assert (spilled(worker), kept(answer), answer["asked_bytes"]) == (["a", "d"], (1, 0, 0), None)
    now[0] = 110
    assert trim(worker, idle_seconds=60.5)["spilled_entries"] == 0
    assert trim(worker, idle_seconds=60)["spilled_entries"] == 1


def test_views_of_one_storage_go_together_or_not_at_all():
    worker = worker_with({**batch("abc"), **tensors("d")})
    answer = trim(worker, keep_bytes=1099)
    assert (spilled(worker), answer["spilled_bytes"]) == (["a", "b", "c"], 1000)
    assert answer["host_bytes_added"] == 3 * 128


def test_a_batch_is_as_young_and_as_needed_as_its_youngest():
    """One of them used, or needed, keeps all."""
    worker = worker_with({**batch("abc"), **tensors("d")})
    trim(worker, free_bytes=0)
    worker.model_runner.encoder_cache.get("b")
    trim(worker, keep_bytes=1099)
    assert spilled(worker) == ["d"]
    worker = worker_with({**batch("abc"), **tensors("de")}, requests=request("c"))
    assert (trim(worker)["kept"]["needed_entries"], spilled(worker)) == (3, ["d", "e"])


def test_siblings_come_back_one_by_one_and_may_go_again():
    worker = worker_with({**batch("abc"), **tensors("d")})
    trim(worker)
    assert worker.model_runner.encoder_cache["b"].content == "b"
    answer = trim(worker)
    assert (answer["spilled_entries"], answer["spilled_bytes"], answer["encoder_cache"]["spills"]) == (1, 100, 5)


def named(modality):
    """A tensor as vLLM hands it to a model: what it shows is hung on it."""
    tensor = FakeTensor(50)
    tensor.modality = modality
    return tensor


def sparse():
    tensor = FakeTensor(50)
    tensor.layout = "torch.sparse_coo"
    return tensor


ODD = {
    "none": None,
    "text": "text",
    "pair": (FakeTensor(50), FakeTensor(50)),
    "dict": {"x": FakeTensor(50)},
    "on the host": FakeTensor(50, device="cpu"),
    "empty": FakeTensor(0),
    "subclass": type("Parameter", (FakeTensor,), {})(50),
    "larger than its storage": FakeTensor(50, storage=FakeStorage(99)),
    "named": named("image"),
    "sparse": sparse(),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_what_would_not_come_back_the_same_stays(value):
    worker = worker_with({"odd": value, **tensors("ab")})
    answer = trim(worker)
    assert (spilled(worker), kept(answer)) == (["a", "b"], (0, 0, 1))
    assert dict.__getitem__(worker.model_runner.encoder_cache, "odd") is value


def test_a_tensor_on_another_device_stays():
    """It would come back to the wrong place, or for nothing."""
    cache = tensors("abc")
    cache["a"].device.index, cache["b"].device.index = 0, 1
    worker = worker_with(cache)
    assert (kept(trim(worker)), spilled(worker)) == ((0, 0, 1), ["b", "c"])


def test_a_storage_that_something_else_holds_stays():
    """The device would get nothing back for the part that can go."""
    views = batch("ab")
    worker = worker_with({"a": views["a"], "pair": (views["b"], FakeTensor(1)), **tensors("cd")})
    answer = trim(worker)
    assert (spilled(worker), kept(answer)) == (["c", "d"], (0, 0, 2))
    assert trim(worker, keep_bytes=0)["asked_bytes"] == 1002


def test_the_hosts_budget_is_never_exceeded():
    """It counts what lies there already; pinned memory comes in powers of two. A smaller entry may still fit."""
    worker = worker_with({**tensors("a"), **tensors("b", elements=100), **tensors("c")})
    answer = trim(worker, host_budget_bytes=128 + 255)
    assert (spilled(worker), kept(answer), answer["host_bytes_added"]) == (["a", "c"], (0, 1, 0), 256)
    assert "budget is 511 bytes, of which 256 are taken" in refusal(worker, "trim", '{"host_budget_bytes": 511}')
    assert trim(worker, host_budget_bytes=512)["spilled_entries"] == 1


@pytest.mark.parametrize("budget", [0, 127])
def test_a_budget_that_fits_nothing_is_refused(budget):
    """Zero entries moved would read as success."""
    worker = worker_with(tensors())
    assert "4 stay on the device" in refusal(worker, "trim", json.dumps({"host_budget_bytes": budget}))
    assert [value.content for value in worker.model_runner.encoder_cache.values()] == list("abcd")
    assert trim(worker, keep_bytes=1000, host_budget_bytes=0)["spilled_entries"] == 0


def test_copies_are_pinned_where_the_device_gains_from_it(npu, monkeypatch, torch_device):
    """Where pages cannot be locked, the copy is slower, and the note says so once."""
    worker = worker_with(tensors())
    trim(worker, keep_bytes=300)
    npu.pin_error = RuntimeError("locked memory is used up")
    answer = trim(worker, keep_bytes=100)
    pinned = [
        value.host.is_pinned for value in dict.values(worker.model_runner.encoder_cache) if type(value) is Spilled
    ]
    assert (pinned, answer["host_bytes_added"]) == ([True, False, False], 200)
    reason = "in pageable memory, because pinning failed: RuntimeError: locked memory is used up"
    assert answer["notes"] == [{"name": "host_bytes_added", "reason": reason}]


def test_a_cpu_worker_spills_too_and_says_that_it_gains_nothing(torch_device):
    torch_device("cpu")
    cache = {name: FakeTensor(50, device="cpu", content=name) for name in "ab"}
    worker = worker_with(cache, "cpu")
    answer = trim(worker, free_bytes=100)
    assert (answer["spilled_bytes"], answer["host_bytes_added"]) == (100, 100)
    assert [note["name"] for note in answer["notes"]] == ["spilled_bytes"]
    rows = {row["mm_hash"]: row for row in ask(worker, "encoder_cache")["entries"]}
    assert {name: row["residency"] for name, row in rows.items()} == {"a": "host", "b": "device"}
    assert (answer["encoder_cache"]["device_bytes"], answer["encoder_cache"]["host_bytes"]) == (100, 100)


def test_a_copy_that_fails_leaves_its_batch_whole(npu):
    worker = worker_with({**tensors("a"), **batch("bcd"), **tensors("e")})
    npu.copy_errors = [None, None, MemoryError("no host memory")]
    answer = trim(worker)
    assert (spilled(worker), kept(answer)) == (["a"], (0, 0, 3))
    assert answer["notes"] == [
        {"name": "spilled_entries", "reason": "no more, because a copy failed: MemoryError: no host memory"}
    ]
    assert [value.content for value in worker.model_runner.encoder_cache.values()] == list("abcde")


def test_a_device_that_cannot_be_waited_for_keeps_everything(npu, monkeypatch):
    monkeypatch.setattr(npu, "synchronize", raising(RuntimeError("device says no")), raising=False)
    worker = worker_with(tensors())
    assert (trim(worker)["spilled_entries"], spilled(worker)) == (0, [])


def test_an_access_without_room_gets_the_allocators_blocks_and_a_second_try(npu):
    worker = worker_with(tensors())
    trim(worker)
    cache = worker.model_runner.encoder_cache
    npu.calls.clear()
    npu.copy_errors = [RuntimeError("out of memory")]
    assert cache["a"].content == "a"
    assert [name for name, _ in npu.calls] == ["copy", "empty_cache", "memory_stats", "copy"]
    npu.copy_errors = [RuntimeError("out of memory"), *[RuntimeError("still out of memory")] * 9]
    with pytest.raises(RuntimeError, match=r"^out of memory"):
        cache.get("b")
    assert spilled(worker) == ["b", "c", "d"]
    npu.copy_errors = []
    assert cache["b"].content == "b"


def test_the_first_failure_is_what_the_engine_sees(npu, monkeypatch):
    worker = worker_with(tensors())
    trim(worker)
    monkeypatch.setattr(npu, "empty_cache", raising(OSError("driver says no")), raising=False)
    npu.copy_errors = [RuntimeError("out of memory")] * 9
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.model_runner.encoder_cache["a"]


def test_runner_v2s_outputs_are_replaced_one_deeper():
    cache = SimpleNamespace(encoder_outputs=tensors(), mm_features={})
    worker = worker_with(cache, requests=None)
    answer = trim(worker)
    assert (answer["kind"], answer["spilled_entries"]) == ("encoder_outputs", 4)
    assert worker.model_runner.encoder_cache is cache
    assert isinstance(cache.encoder_outputs, SpillingDict)
    assert cache.encoder_outputs.get("c").content == "c"


@pytest.mark.parametrize("runner", [{"encoder_cache": None}, {"supports_mm_inputs": False}, {}])
@pytest.mark.parametrize(("payload", "asked"), [({}, None), ({"free_bytes": 7}, 7), ({"keep_bytes": 7}, 0)])
def test_nothing_to_spill_is_no_error(runner, payload, asked):
    worker = fake_worker(model_runner=fake_runner(**runner))
    answer = trim(worker, **payload)
    assert (answer["asked_bytes"], answer["spilled_entries"], kept(answer)) == (asked, 0, (0, 0, 0))
    assert (answer["kind"], answer["encoder_cache"] is None) == ((None, True) if runner else ("dict", False))
    assert [note["name"] for note in answer["notes"]] == ["encoder_cache"]


@pytest.mark.parametrize(
    ("payload", "both"),
    [
        ({"free_bytes": 1, "keep_bytes": 1}, ("free_bytes", "keep_bytes")),
        ({"keep_bytes": 0, "idle_seconds": 0}, ("keep_bytes", "idle_seconds")),
        ({"free_bytes": 1, "idle_seconds": 1, "host_budget_bytes": 5}, ("free_bytes", "idle_seconds")),
    ],
)
def test_two_targets_are_a_contradiction(payload, both):
    error = json.loads(worker_with(tensors()).highwater_rpc("trim", json.dumps(payload)))["error"]
    assert error["code"] == "bad_payload"
    assert all(repr(name) in error["message"] for name in both)


def test_the_counts_outlive_a_cache_that_the_engine_makes_anew():
    worker = worker_with(tensors())
    trim(worker)
    worker.model_runner.encoder_cache = tensors("xy")
    assert trim(worker)["encoder_cache"]["spills"] == 6


def test_an_entry_keeps_its_age_wherever_it_lies(monkeypatch):
    worker = worker_with(tensors("ab"))
    ask(worker, "memory")
    for _ in range(2):
        trim(worker)
        worker.model_runner.encoder_cache.get("a")
    later = time.monotonic() + 30
    clock = SimpleNamespace(monotonic=lambda: later, perf_counter=time.perf_counter)
    monkeypatch.setattr("highwater_worker.encoder_cache.index.time", clock)
    rows = ask(worker, "encoder_cache")["entries"]
    assert all(row["age_seconds"] >= 29 for row in rows)
    assert all(0 <= row["idle_seconds"] < 5 for row in rows)


# --- refusals ---


def configured(**config):
    worker = worker_with(tensors())
    vars(worker.vllm_config).update(config)
    worker.parallel_config = worker.vllm_config.parallel_config  # one object, as vLLM's workers have it
    return worker


def cache_of_a_kind(kind):
    return worker_with(kind(tensors()))


class Theirs(dict):
    """Somebody's dict."""


class UsesRay:
    """A class of executor that names Ray."""


REFUSED = {
    "ec connector": (lambda: configured(ec_transfer_config=SimpleNamespace(ec_connector="Mooncake")), "Mooncake"),
    "cache manager": (
        lambda: configured(ec_manager_config=SimpleNamespace(encoder_cache_manager_cls="a.B")),
        "encoder_cache_manager_cls: a.B",
    ),
    "ray": (lambda: configured(parallel_config=SimpleNamespace(distributed_executor_backend="ray")), "Ray"),
    "ray by class": (
        lambda: configured(parallel_config=SimpleNamespace(distributed_executor_backend=UsesRay)),
        "Ray",
    ),
    "ray by its own word": (lambda: configured(parallel_config=SimpleNamespace(use_ray=True)), "Ray"),
    "no configuration": (lambda: fake_worker(vllm_config=None), "no vllm_config"),
    "ascend's host tier": (
        lambda: worker_with(tensors(), use_score_encoder_cache=True, cpu_encoder_cache={}),
        "model_runner.use_score_encoder_cache is set",
    ),
    "ascend's outputs": (lambda: worker_with(tensors(), cpu_encoder_cache={"a": 1}), "cpu_encoder_cache is in use"),
    "ascend's copies": (lambda: worker_with({}, _pending_encoder_cache_copies=[1]), "vllm-ascend"),
    "somebody's dict": (lambda: cache_of_a_kind(Theirs), "is a Theirs"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_dangerous_is_refused(make, reason):
    worker = make()
    before = worker.model_runner.encoder_cache
    kind = type(before)
    assert reason in refusal(worker, "trim")
    assert worker.model_runner.encoder_cache is before
    assert type(before) is kind


@pytest.mark.parametrize("manager", [None, SimpleNamespace(encoder_cache_manager_cls=None)])
def test_the_engines_defaults_are_not_refused(manager):
    """vLLM has these objects in every configuration."""
    parallel = SimpleNamespace(distributed_executor_backend="mp", use_ray=False)
    worker = configured(ec_transfer_config=None, ec_manager_config=manager, parallel_config=parallel)
    assert trim(worker)["spilled_entries"] == 4


@pytest.mark.parametrize("score", [{}, {"use_score_encoder_cache": False}])
def test_ascends_own_tier_out_of_use_is_not_refused(score):
    """Every runner of vllm-ascend from 0.27.1rc1 on has the three attributes, its own tier in use or not."""
    empty = {"cpu_encoder_cache": {}, "tmp_encoder_cache": {}, "_pending_encoder_cache_copies": deque()}
    assert trim(worker_with(tensors(), **empty, **score))["spilled_entries"] == 4


@pytest.mark.parametrize("module", ["vllm.v1.executor.multiproc_executor", "somewhere.else"])
def test_rays_second_executor_is_not_refused(module):
    """There, the loop that runs steps is what called: RayExecutorV2 runs the multiprocessing executor's own."""
    worker = configured(parallel_config=SimpleNamespace(distributed_executor_backend="ray"))
    loop = {"__name__": module}
    exec("def worker_busy_loop(call):\n    return call()\n", loop)  # noqa: S102 - a function of another module's
    answer = json.loads(loop["worker_busy_loop"](lambda: worker.highwater_rpc("trim", "{}")))
    assert answer["ok"] is module.startswith("vllm."), answer


@pytest.mark.parametrize("op", ["trim", "restore"])
def test_another_thread_is_refused(op):
    """A step may be running on the main one."""
    worker = worker_with(tensors())
    trim(worker, keep_bytes=300)
    assert "main thread" in in_a_thread(lambda: refusal(worker, op))
    assert spilled(worker) == ["a"]


def test_an_engine_that_forbids_waits_is_refused(monkeypatch):
    """To bring an entry back within a step would raise there."""
    module = ModuleType("vllm.utils.gpu_sync_debug")
    module._SYNC_CHECK_MODE = "error"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "VLLM_GPU_SYNC_CHECK" in refusal(worker_with(tensors()), "trim")
    module._SYNC_CHECK_MODE = None
    assert trim(worker_with(tensors()))["spilled_entries"] == 4


def test_a_cache_that_somebody_else_holds_is_refused():
    """They would go on with the old one: entries that the engine frees would stay on the device."""
    worker = worker_with(tensors())
    holder = SimpleNamespace(cache=worker.model_runner.encoder_cache)
    assert "other code holds the encoder cache's dict" in refusal(worker, "trim")
    del holder
    assert trim(worker)["spilled_entries"] == 4


def test_a_call_in_progress_is_no_holder(monkeypatch):
    """Its variables go with it. (Python 3.12 starts with objects that the collector does not see.)"""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    worker = worker_with(tensors())
    cache = worker.model_runner.encoder_cache
    assert trim(worker)["spilled_entries"] == 4
    assert len(cache) == 4


def test_holders_that_cannot_be_seen_are_refused_too(monkeypatch):
    """vLLM hides its heap from the garbage collector once it is warm."""
    worker = worker_with(tensors())
    cache = worker.model_runner.encoder_cache
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    assert "something that cannot be seen" in refusal(worker, "trim")
    del cache
    assert trim(worker)["spilled_entries"] == 4


def test_once_in_place_it_stays():
    """The second trim replaces nothing: whoever holds ours holds the right one."""
    worker = worker_with(tensors())
    trim(worker, free_bytes=0)
    holder = [worker.model_runner.encoder_cache]
    trim(worker)
    assert worker.model_runner.encoder_cache is holder[0]


def test_ranks_that_see_the_same_accesses_decide_alike():
    ranks = [worker_with({**tensors("abc"), **batch("def")}) for _ in range(2)]
    for delay, worker in enumerate(ranks):
        trim(worker, free_bytes=0)
        cache = worker.model_runner.encoder_cache
        cache._clock = lambda delay=delay: 1000.0 * delay
        for key in "cade":
            cache.get(key)
        trim(worker, keep_bytes=1050)
    assert spilled(ranks[0]) == spilled(ranks[1]) == ["a", "b", "c"]


# --- what the engine frees ---


class V1:
    """Keeps the dict on the runner, and pops in a step."""

    def __init__(self):
        self.encoder_cache = tensors()
        self.popped = []

    def _process_encoder_cache_scheduler_output(self, names):
        self.popped += [self.encoder_cache.pop(name, None) for name in names]

    def _update_states(self, names):
        self._process_encoder_cache_scheduler_output(names)
        return "corrections"

    def other(self, name):
        return self.encoder_cache.pop(name)


class V2Cache:
    def __init__(self):
        self.encoder_outputs = tensors()
        self.popped = []

    def free_encoder_cache(self, name):
        self.popped.append(self.encoder_outputs.pop(name, None))


def copies_back(npu):
    return [call for call in npu.calls if call == ("copy", ("cpu", "npu"))]


def test_what_model_runner_v1_frees_is_not_brought_back_first(npu):
    runner = V1()
    worker = fake_worker(model_runner=runner)
    assert trim(worker)["spilled_entries"] == 4
    assert runner._update_states(["a", "z"]) == "corrections"
    runner._process_encoder_cache_scheduler_output(["b"])
    assert (copies_back(npu), sorted(dict.keys(runner.encoder_cache))) == ([], ["c", "d"])
    assert runner.other("c").device.type == "npu"
    assert len(copies_back(npu)) == 1


def test_what_model_runner_v2_frees_is_not_brought_back_first(npu):
    cache = V2Cache()
    worker = fake_worker(model_runner=SimpleNamespace(encoder_cache=cache))
    assert trim(worker)["spilled_entries"] == 4
    cache.free_encoder_cache("a")
    assert (copies_back(npu), len(cache.encoder_outputs)) == ([], 3)
    assert cache.encoder_outputs.pop("b").device.type == "npu"


def test_a_cache_that_the_engine_made_anew_is_watched_as_the_first_one(npu):
    runner = V1()
    worker = fake_worker(model_runner=runner)
    for _ in range(3):
        runner.encoder_cache = tensors()
        runner._update_states(["a"])
        assert trim(worker)["spilled_entries"] == 3
        runner._update_states(["b"])
    assert copies_back(npu) == []
    assert not hasattr(vars(runner)["_update_states"].__wrapped__, "_highwater_freeing")


def test_a_runner_that_frees_and_goes_is_not_kept_by_the_watch():
    runner = V1()
    worker = fake_worker(model_runner=runner)
    trim(worker)
    gone = weakref.ref(runner)
    worker.model_runner = None
    del runner
    gc.collect()
    assert gone() is None
