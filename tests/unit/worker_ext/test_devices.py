"""Every family answers through the same seam, and every call names its device."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from highwater_worker.devices import HostMemory, device_of
from highwater_worker.errors import UnreadableError
from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import ask, fake_worker, in_a_thread, refusal

ACCELERATORS = ("npu", "cuda")


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_every_call_names_the_workers_device(kind, torch_device):
    """One without an index would make a context on device 0 in every rank."""
    module = torch_device(kind)
    worker = fake_worker(kind, 5)
    for op in ("memory", "release"):
        ask(worker, op)
    assert {index for name, index in module.calls if name != "empty_cache"} == {5}


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_the_main_thread_keeps_its_device(kind, torch_device):
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


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        (
            {"model_runner": SimpleNamespace(device=SimpleNamespace(type="npu", index=4))},
            ("npu", 4),
        ),  # vllm-ascend 0.11
        ({"device_config": SimpleNamespace(device_type="cpu")}, ("cpu", None)),
    ],
    ids=["its runner", "its configuration"],
)
def test_a_worker_without_a_device_has_that_of(attributes, expected):
    device = device_of(fake_worker(device=None, **attributes))
    assert (device.type, device.index) == expected


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"device": None}, "the worker's device is of type None; known: npu, cuda, cpu"),
        ({"device": SimpleNamespace(type="xpu", index=0)}, "the worker's device is of type xpu; known: npu,"),
        ({"device": SimpleNamespace(type="cuda", index=None)}, "the worker's device is cuda without an index"),
    ],
)
def test_an_unknown_device_is_refused(attributes, reason):
    """Nothing is guessed, least of all index 0."""
    with pytest.raises(UnreadableError, match=reason):
        device_of(fake_worker(**attributes))


# --- integrated GPUs ---


@pytest.fixture
def machine_gives(monkeypatch):
    """`machine_gives(3_000)`: what /proc/meminfo tells to be available."""

    def put(available):
        host = HostMemory(10, None, None, 5_000, available)
        for module in ("recorder.reading", "operations.memory"):
            monkeypatch.setattr(f"highwater_worker.{module}.read_host", lambda _: host)

    return put


def space(worker):
    answer = ask(worker, "memory")
    return answer["total_bytes"], answer["free_bytes"], answer["used_bytes"]


def test_an_integrated_gpu_can_have_what_the_machine_can_give(torch_device, machine_gives):
    """Its driver leaves out the file pages that the kernel would drop: the device would look full all day."""
    torch_device("cuda").properties["is_integrated"] = 1
    machine_gives(3_000)
    worker = fake_worker("cuda")
    assert space(worker) == (5_000, 3_000, 2_000)
    assert ask(worker, "release")["before"]["free_bytes"] == 3_000
    machine_gives(9_000)  # of a machine that shows more than the device may have
    assert space(worker) == (5_000, 5_000, 0)


@pytest.mark.parametrize(
    ("kind", "properties", "around"),
    [
        ("cuda", {"is_integrated": 0}, (None, 3_000)),
        ("cuda", {}, (None, 3_000)),
        ("cuda", {"is_integrated": 1}, ("7.0", 3_000)),
        ("cuda", {"is_integrated": 1}, (None, None)),  # without /proc
        ("npu", {}, (None, 3_000)),
    ],
)
def test_any_other_device_is_its_drivers_word(kind, properties, around, torch_device, machine_gives):
    """vLLM makes the exception for NVIDIA's alone."""
    torch_device(kind).properties.update(properties)
    hip, available = around
    sys.modules["torch"].version = SimpleNamespace(hip=hip)
    machine_gives(available)
    assert space(fake_worker(kind)) == (5_000, 1_000, 4_000)


# --- which card it is ---


def identity(kind, index=1):
    device = ask(fake_worker(kind, index), "memory")["device"]
    return device["uuid"], device["physical_index"]


@pytest.mark.parametrize(
    ("kind", "properties", "shown"),
    [
        ("cuda", {"uuid": "604ac76c-d9cf-fef3-62e9-d92044ab6e52"}, "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"),
        ("cuda", {"uuid": "GPU-604ac76c"}, "GPU-604ac76c"),
        ("cuda", {"uuid": "00000000-0000-0000-0000-000000000000"}, None),
        ("cuda", {"uuid": ""}, None),
        ("cuda", {"uuid": None}, None),
        ("cuda", {"uuid": b"\x60\x4a"}, "GPU-604a"),
        ("npu", {"uuid": "604ac76c"}, "604ac76c"),
        ("npu", {}, None),  # older versions of torch_npu
    ],
)
def test_a_devices_identity_is_as_torch_tells_it_and_a_gpus_as_nvidia_smi(kind, properties, shown, torch_device):
    """So that DCGM's metrics join with ours. Zeros are no identity: by them all devices would be one."""
    torch_device(kind).properties = properties
    assert identity(kind)[0] == shown


@pytest.mark.parametrize(
    ("visible", "physical"),
    [(None, 1), ("", 1), ("4,5,6", 5), ("4, 6", 6), ("4", None), ("GPU-a,GPU-b", None)],
)
def test_a_devices_number_on_the_machine_is_that_of_its_driver(visible, physical, torch_device, monkeypatch):
    """Two engines that see one NPU each both call it 0."""
    torch_device("npu")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert identity("npu")[1] == physical


def test_a_slice_of_a_gpu_is_a_device_of_its_own(torch_device, monkeypatch):
    """Its properties may tell the whole GPU's identity."""
    torch_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert identity("cuda") == ("MIG-2", None)


def test_a_drivers_properties_are_asked_for_once(torch_device):
    module, worker = torch_device("npu"), fake_worker()
    for _ in range(3):
        ask(worker, "memory")
    assert [name for name, _ in module.calls].count("get_device_properties") == 1


# --- suspended by somebody else ---


def suspended_by(name, state):
    worker = fake_worker("cuda")
    worker._sleep_mode_backend = type(name, (), {"_state": state})()
    return worker


@pytest.mark.parametrize("state", ["SUSPENDED", "RESUMING"])
def test_a_device_that_was_taken_away_is_not_asked(state, torch_device):
    """A call to its driver would wait for the engine to resume, on the thread that resumes it."""
    module = torch_device("cuda")
    worker = suspended_by("ProcessCheckpoint", state)
    answer = ask(worker, "memory")
    assert (answer["total_bytes"], answer["free_bytes"], answer["used_bytes"]) == (None, None, None)
    assert [note["name"] for note in answer["notes"]] == ["total_bytes"]
    assert ask(worker, "memory")["device"]["type"] == "cuda"
    assert module.looks == 0
    assert "suspended by ProcessCheckpoint" in refusal(worker, "release")
    assert not {"mem_get_info", "empty_cache"} & {name for name, _ in module.calls}


@pytest.mark.parametrize(("name", "state"), [("CuMemBackend", "SUSPENDED"), ("ProcessCheckpoint", "RUNNING")])
def test_a_device_that_is_there_is_asked(name, state, torch_device):
    """vLLM's own sleep mode unmaps memory, and leaves the device as it is."""
    torch_device("cuda")
    assert ask(suspended_by(name, state), "memory")["free_bytes"] == 1_000


def test_of_a_lost_npu_no_memory_is_told(torch_device, monkeypatch):
    """torch's own counters go on, but nothing that they count could be given back."""
    module, worker = torch_device("npu"), fake_worker("npu")
    assert ask(worker, "memory")["releasable_bytes"] is not None
    monkeypatch.setattr(
        module,
        "mem_get_info",
        raising(RuntimeError("NPU function error: aclrtGetMemInfo, error code is 507010 [ERROR] ERR00100 PTA call")),
    )
    answer = ask(worker, "memory")
    assert (answer["used_bytes"], answer["free_bytes"], answer["releasable_bytes"]) == (None, None, None)
    (note,) = [note for note in answer["notes"] if note["name"] == "total_bytes"]
    assert "the NPU was lost (507010)" in note["reason"]
