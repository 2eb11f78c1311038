"""`hello` says who this is and what it can do."""

from __future__ import annotations

import sys
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import pytest

from tests.unit.worker_ext.fakes import ask, fake_runner, fake_worker


def runner_of(module: str) -> object:
    """A runner of a class that inherits from one defined in `module`."""
    base = type("GPUModelRunner", (SimpleNamespace,), {"__module__": module})
    return type("Derived", (base,), {"__module__": "elsewhere"})(**vars(fake_runner()))


def test_it_introduces_worker_and_extension(torch_device, monkeypatch):
    """Versions come from the modules at hand: the installed distribution may have another name."""
    torch_device("npu")
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.13.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    answer = ask(fake_worker(), "hello")
    assert answer["ops"] == [
        "budget", "encoder_cache", "hello", "memory", "record_stacks", "recorder_start", "recorder_stop", "release",
        "restore", "snapshot", "trim",
    ]  # fmt: skip
    device = {"type": "npu", "index": 1, "physical_index": 1, "name": "Fake 9000", "uuid": "npu-0001"}
    assert answer["device"] == device
    assert answer["worker_class"].endswith("FakeWorker")
    assert answer["runner_class"].endswith("FakeRunner")
    assert (answer["vllm_version"], answer["torch_version"]) == ("0.13.0", "2.9.0+fake")
    assert (answer["encoder_cache_kind"], answer["runner_version"], answer["notes"]) == ("dict", None, [])


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("vllm.v1.worker.gpu_model_runner", "v1"),
        ("vllm.v1.worker.gpu.model_runner", "v2"),
        ("vllm_ascend.worker.model_runner_v1", "v1"),
        ("vllm_ascend.worker.v2.model_runner", "v2"),
        ("somewhere.new", None),
    ],
)
def test_the_runners_version_is_that_of_its_class(module, expected, torch_device):
    torch_device("npu")
    assert ask(fake_worker(model_runner=runner_of(module)), "hello")["runner_version"] == expected


def test_the_version_is_the_distributions(torch_device):
    torch_device("npu")
    assert ask(fake_worker(), "hello")["extension_version"] == version("vllm-highwater")
