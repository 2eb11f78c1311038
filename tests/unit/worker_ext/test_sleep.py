"""An engine that sleeps, in whole or in part, is seen on every version, and left alone."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest

from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import FakeTensor, ask, fake_runner, fake_worker, refusal

MOVES = [("trim", {}), ("restore", {}), ("snapshot", {"dry_run": True})]


@pytest.fixture(autouse=True)
def npu(torch_device):
    return torch_device("npu")


def sleeper(**methods):
    """A worker with the methods that vLLM's has; each is kept with its arguments."""
    worker = fake_worker(model_runner=fake_runner(encoder_cache={name: FakeTensor(50) for name in "abc"}))
    worker.calls = []
    kind = type(worker)
    kind.sleep = lambda self, level=1: self.calls.append(("sleep", level))
    kind.wake_up = lambda self, tags=None: self.calls.append(("wake_up", tags))
    for name, method in methods.items():
        setattr(kind, name, method)
    return worker


@pytest.fixture
def allocator(monkeypatch):
    """`allocator("vllm.device_allocator.cumem", "CuMemAllocator", pools)` as the engine's own module."""

    def install(name, kind, *allocations):
        module = ModuleType(name)
        instance = SimpleNamespace(pointer_to_data=dict(enumerate(allocations)))
        setattr(module, kind, SimpleNamespace(instance=instance))
        monkeypatch.setitem(sys.modules, name, module)
        return instance

    return install


def asleep(worker):
    return ask(worker, "memory")["asleep_tags"]


def test_all_of_it_sleeps_and_wakes():
    worker = sleeper()
    assert asleep(worker) == []
    assert worker.sleep(level=2) is None
    assert asleep(worker) == ["kv_cache", "weights"]
    worker.wake_up()
    assert asleep(worker) == []
    assert worker.calls == [("sleep", 2), ("wake_up", None)]


def test_a_partial_wake_up_leaves_the_rest_asleep():
    worker = sleeper()
    asleep(worker)
    worker.sleep()
    worker.wake_up(["weights"])
    assert asleep(worker) == ["kv_cache"]
    worker.wake_up(tags=["kv_cache"])
    assert asleep(worker) == []


def test_single_pools_can_be_put_to_sleep():
    """Newer engines' `discard`."""
    worker = sleeper(discard=lambda self, tags: self.calls.append(("discard", tags)))
    asleep(worker)
    worker.discard(("kv_cache",))
    assert asleep(worker) == ["kv_cache"]


@pytest.mark.parametrize(("op", "payload"), MOVES, ids=[op for op, _ in MOVES])
@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_what_touches_memory_is_refused_until_all_is_awake(op, payload, tags, npu):
    """What was given up may be somebody else's, and what is taken now may be missing at the wake-up."""
    worker, payload = sleeper(), json.dumps(payload)
    ask(worker, "trim", '{"keep_bytes": 100}')
    worker.sleep()
    if tags:
        worker.wake_up(tags)
    npu.calls.clear()
    assert "the engine sleeps" in refusal(worker, op, payload)
    assert npu.calls == []
    worker.wake_up()
    ask(worker, op, payload)


def test_a_release_gives_back_what_a_sleep_left_and_collects_nothing(npu, monkeypatch):
    """Garbage may lie in a pool that is unmapped; what the allocator keeps does not."""
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected while asleep"))
    worker = sleeper()
    asleep(worker)
    worker.sleep()
    answer = ask(worker, "release")
    assert (answer["mechanism"], answer["gc_collected"]) == ("empty_cache", 0)
    assert "empty_cache" in {call[0] for call in npu.calls}


def test_a_wake_up_that_fails_wakes_nothing():
    fail = raising(RuntimeError("no memory"))
    worker = sleeper(sleep=fail, wake_up=fail)
    asleep(worker)
    for call in (worker.sleep, worker.wake_up):
        with pytest.raises(RuntimeError, match="no memory"):
            call()
        assert asleep(worker) == ["kv_cache", "weights"]


def test_the_reserve_is_given_up_for_the_sleep_and_kept_again_afterwards(npu):
    """A sleeping engine has the device given to somebody else, all of it."""
    worker = sleeper()
    block = ask(worker, "trim")["encoder_cache"]
    assert block["restore_reserve_bytes"] == 100
    worker.sleep()
    assert ask(worker, "memory")["encoder_cache"]["restore_reserve_bytes"] == 0
    worker.wake_up(["weights"])
    assert ask(worker, "memory")["encoder_cache"]["restore_reserve_bytes"] == 0
    worker.wake_up(["kv_cache"])
    assert ask(worker, "memory")["encoder_cache"]["restore_reserve_bytes"] == 100


def test_watching_keeps_no_worker_alive():
    worker = sleeper()
    asleep(worker)
    worker.sleep()
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None


def test_a_worker_without_these_methods_is_asked_all_the_same():
    worker = fake_worker()
    assert asleep(worker) == []
    assert not {"sleep", "wake_up", "discard"} & set(vars(worker))


# --- engines that slept before the first call ---


def test_the_allocator_tells_what_sleeps(allocator):
    """From vLLM 0.27 on, each allocation says so."""
    pools = [SimpleNamespace(tag=tag, is_asleep=tag == "kv_cache") for tag in ("weights", "kv_cache")]
    allocator("vllm.device_allocator.cumem", "CuMemAllocator", *pools)
    worker = sleeper()
    assert asleep(worker) == ["kv_cache"]
    assert "the engine sleeps (kv_cache)" in refusal(worker, "trim")
    pools[1].is_asleep = False
    assert asleep(worker) == []


def test_what_a_sleep_has_saved_tells_too(allocator):
    """Older engines and vllm-ascend keep a copy of the weights, or of the buffers, until they wake."""
    pools = [SimpleNamespace(tag="weights", cpu_backup_tensor=object()), SimpleNamespace(tag="kv_cache")]
    allocator("vllm_ascend.device_allocator.camem", "CaMemAllocator", *pools)
    worker = sleeper()
    assert asleep(worker) == ["weights"]
    pools[0].cpu_backup_tensor = None
    assert asleep(worker) is None
    worker._sleep_saved_buffers = {"buffer": 1}
    assert asleep(worker) == ["weights"]


def test_unknown_is_said_and_not_refused_until_a_call_tells(allocator):
    allocator("vllm.device_allocator.cumem", "CuMemAllocator", SimpleNamespace(tag="kv_cache"))
    worker = sleeper()
    answer = ask(worker, "memory")
    assert answer["asleep_tags"] is None
    assert "asleep_tags" in {note["name"] for note in answer["notes"]}
    ask(worker, "release")
    worker.wake_up(["weights"])
    assert asleep(worker) is None
    worker.wake_up()
    assert asleep(worker) == []


@pytest.mark.parametrize(("state", "expected"), [("SUSPENDED", ["kv_cache", "weights"]), ("RUNNING", [])])
def test_other_backends_tell_their_state(state, expected):
    """Those that use none of the allocators (vllm/device_allocator/sleep_mode_backend.py)."""
    worker = sleeper()
    worker._sleep_mode_backend = SimpleNamespace(_state=state)
    assert asleep(worker) == expected
