"""A fake torch where `import torch` finds it; the development environment has no real one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.unit.worker_ext.fakes import FakeDeviceModule, FakeTorch


@pytest.fixture
def torch_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FakeDeviceModule]:
    """`torch_device("npu")` puts a torch with that device in place, and returns the device's module."""

    def install(kind: str) -> FakeDeviceModule:
        torch = FakeTorch(kind)
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch.device_module

    return install
