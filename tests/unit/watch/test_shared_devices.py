"""Who else uses the engine's devices: what recorder files and NVML say, and what is made of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from highwater.model.rank import Device, RankReading
from highwater.process.clocks import Clocks
from highwater.watch.history import History
from highwater.watch.recorder.folder import RecorderFolder
from highwater.watch.shared_devices import MIN_OTHER_BYTES, SharedDevices, find_nvml
from tests.fakes.ranks import reading, report
from tests.fakes.ring import MONO, WALL, FakeWriter

OTHER = "f" * 16


class FakeNvml(ModuleType):
    """NVML's bindings beside a driver that knows one device, and whoever computes on it."""

    class NVMLError(Exception):
        """As the bindings raise it."""

    def __init__(self, processes: dict[int, int | None]) -> None:
        super().__init__("pynvml")
        self.processes = processes

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - the bindings' name
        if uuid != "gpu-0-0":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802 - likewise
        assert handle == "gpu-0-0"
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes.items()]


@pytest.fixture
def history():
    return History(10)


def watch(history: History, *ranks: RankReading, recorders=None, nvml=None) -> SharedDevices:
    return SharedDevices(lambda: report(*ranks), history, recorders=recorders, nvml=nvml)


def events(history: History) -> list[str]:
    return [event.summary for event in history.events()]


@pytest.mark.parametrize(
    ("processes", "is_shared"),
    [
        ({4242: 10**10}, False),
        ({4242: 10**10, 99: MIN_OTHER_BYTES}, True),
        ({4242: 10**10, 99: MIN_OTHER_BYTES - 1}, False),  # a monitor
        ({4242: 10**10, 99: None}, False),  # the driver does not say how much
        ({99: 10**10}, False),  # another PID namespace: ours may be among them
        ({}, False),
    ],
)
async def test_nvml_names_another_process(history, processes, is_shared):
    shared = watch(history, reading(), nvml=FakeNvml(processes))
    await shared.look()
    assert shared.cards == (frozenset({"node-a/gpu-0-0"}) if is_shared else frozenset())
    assert len(events(history)) == is_shared


async def test_two_ranks_on_one_device_are_both_ours(history):
    second = replace(reading(1), device=reading(0).device)
    shared = watch(history, reading(0), second, nvml=FakeNvml({4242: 10**10, 4243: 10**10}))
    await shared.look()
    assert shared.cards == frozenset()


async def test_what_is_shared_is_noted_once_and_forgotten_when_the_other_goes(history):
    nvml = FakeNvml({4242: 10**10, 99: 10**9})
    shared = watch(history, reading(), nvml=nvml)
    await shared.look()
    await shared.look()
    assert [text.split(":")[0] for text in events(history)] == ["device gpu-0-0 is shared"]
    del nvml.processes[99]
    await shared.look()
    assert shared.cards == frozenset()


async def test_a_device_that_the_driver_does_not_know_is_the_engines_own(history):
    shared = watch(history, reading(1), nvml=FakeNvml({4243: 10**10, 99: 10**10}))
    await shared.look()
    assert shared.cards == frozenset()


@pytest.mark.parametrize(
    "device", [Device(type="cpu"), Device(type="cuda", index=0), Device(type="npu", index=0, physical_index=None)]
)
async def test_a_device_without_identity_is_not_looked_for(history, device):
    """Two engines each call theirs number 0."""
    shared = watch(history, replace(reading(), device=device), nvml=FakeNvml({4242: 10**10, 99: 10**10}))
    await shared.look()
    assert shared.cards == frozenset()


@pytest.mark.parametrize(
    ("uuid", "instance", "is_shared"),
    [("gpu-0-0", OTHER, True), ("gpu-0-0", None, False), ("gpu-5-5", OTHER, False)],
    ids=["another engine", "our own file", "another device"],
)
async def test_another_engines_recorder_on_the_same_device(history, tmp_path, uuid, instance, is_shared):
    with ExitStack() as stack:
        ours, device = "a" * 16, {"type": "cuda", "index": 0, "uuid": uuid}
        writer = FakeWriter(tmp_path, instance=instance or ours, pid=77, device=device)
        stack.callback(writer.close)
        writer.sample(0.0)
        recorder = RecorderFolder(tmp_path, ours, clocks=Clocks(lambda: MONO, lambda: WALL))
        stack.callback(recorder.close)
        shared = watch(history, reading(), recorders=recorder)
        await shared.look()
    assert shared.cards == (frozenset({"node-a/gpu-0-0"}) if is_shared else frozenset())


def test_without_the_bindings_there_is_no_witness(history):
    assert find_nvml() is None
    assert not watch(history, reading()).has_witness
