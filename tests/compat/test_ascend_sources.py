"""What was read in Ascend's packages stands there still, and is enough for what Highwater does on an NPU."""

from __future__ import annotations

import json

import pytest

from highwater_worker.memory.start_phases import PHASES
from tests.compat.ascend_sources import TABLE, TORCH_NPU, VLLM_ASCEND, table

STORED = json.loads(TABLE.read_text("utf-8"))
NEEDED = ("get_device_name", "mem_get_info", "memory_stats", "set_device", "synchronize", "empty_cache")


def versions_of(name: str) -> dict[str, str]:
    """Return what is found for a name, by version."""
    rows = [row for row in STORED["found"] if row["name"] == name]
    return {version: row["found"] for row in rows for version in row["version"].split(", ")}


def test_the_table_is_what_the_published_packages_have():
    """`python -m tests.compat.ascend_sources` writes it."""
    assert table() == STORED


@pytest.mark.parametrize("name", NEEDED)
def test_every_version_has_what_each_reading_calls(name: str):
    """With an argument for the device, but for the one that takes none (worker_ext, devices/accelerator.py)."""
    found = versions_of(f"torch.npu: {name}")
    assert set(found) == set(TORCH_NPU)
    takes_device = {version: "device" in signature for version, signature in found.items()}
    assert set(takes_device.values()) == {name != "empty_cache"}, found


@pytest.mark.parametrize("method", PHASES)
def test_a_worker_has_the_methods_whose_time_a_start_is_told_by(method: str):
    """Of its own, or from vLLM's worker, whose methods have the same names."""
    found = versions_of(f"NPUWorker.{method}")
    assert set(found) == set(VLLM_ASCEND)
    assert all(signature.startswith("(self") for signature in found.values()), found
