"""Every family answers through the same seam, and every call names its device."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tests.unit.worker_ext.fakes import ask, fake_worker
from worker_ext.devices import FAMILIES, device_of
from worker_ext.errors import UnreadableError

ACCELERATORS = ("npu", "cuda", "xpu")


def in_a_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_the_families_are_these():
    """One line each."""
    assert [family.type for family in FAMILIES] == [*ACCELERATORS, "cpu"]


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_every_call_names_the_workers_device(kind, torch_device):
    """One without an index would make a context on device 0 in every rank."""
    module = torch_device(kind)
    worker = fake_worker(kind, 5)
    for op in ("hello", "memory", "release"):
        ask(worker, op)
    assert {index for name, index in module.calls if name != "empty_cache"} == {5}


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_the_main_thread_keeps_its_device(kind, torch_device):
    """What the engine set there is the engine's."""
    module = torch_device(kind)
    ask(fake_worker(kind), "memory")
    assert "set_device" not in dict(module.calls)


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_another_thread_gets_the_device_first(kind, torch_device):
    """A fresh thread has none: its first call would go to device 0."""
    module = torch_device(kind)
    worker = fake_worker(kind, 3)
    in_a_thread(lambda: ask(worker, "memory"))
    assert module.calls[0] == ("set_device", 3)


def test_a_worker_without_a_device_has_its_runners():
    """vllm-ascend 0.11 keeps it there alone."""
    runner = SimpleNamespace(device=SimpleNamespace(type="npu", index=4))
    device = device_of(fake_worker(device=None, model_runner=runner))
    assert (device.type, device.index) == ("npu", 4)


def test_a_worker_whose_configuration_says_cpu_is_one():
    """Before the runner is there."""
    worker = fake_worker(device=None, device_config=SimpleNamespace(device_type="cpu"))
    assert device_of(worker).type == "cpu"


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"device": None}, "the worker's device is of type None; known: npu, cuda, xpu, cpu"),
        ({"device": SimpleNamespace(type="hpu", index=0)}, "the worker's device is of type hpu; known: npu,"),
        ({"device": SimpleNamespace(type="cuda", index=None)}, "the worker's device is cuda without an index"),
    ],
)
def test_an_unknown_device_is_refused(attributes, reason):
    """Nothing is guessed, least of all index 0."""
    with pytest.raises(UnreadableError, match=reason):
        device_of(fake_worker(**attributes))


def test_an_older_torch_tells_only_an_xpus_total(torch_device, monkeypatch):
    """What is free stays null, and says why."""
    module = torch_device("xpu")
    monkeypatch.delattr(type(module), "mem_get_info")
    answer = ask(fake_worker("xpu"), "memory")
    assert (answer["total_bytes"], answer["free_bytes"], answer["used_bytes"]) == (5_000, None, None)
    assert {"name": "free_bytes", "reason": "torch.xpu does not tell what is free"} in answer["notes"]
