"""What was read in Ascend's packages stands there still, and is enough for what Highwater does on an NPU."""

from __future__ import annotations

import json

import pytest

from highwater_worker.memory.start_phases import PHASES
from tests.compat.ascend_sources import TABLE, VLLM_ASCEND, table

STORED = json.loads(TABLE.read_text("utf-8"))
NEEDED = ("get_device_name", "mem_get_info", "memory_stats", "set_device", "synchronize", "empty_cache")


def versions_of(name: str) -> dict[str, str]:
    rows = [row for row in STORED["found"] if row["name"] == name]
    return {version: row["found"] for row in rows for version in row["version"].split(", ")}


def test_the_table_is_what_the_published_packages_have():
    assert table() == STORED


@pytest.mark.parametrize("name", [*NEEDED, *(f"NPUWorker.{phase}" for phase in PHASES)])
def test_what_every_reading_and_start_calls_is_in_every_version_as_in_the_one_that_ran(name: str):
    """A row would say which has it otherwise; what ran is in tests/own_engine."""
    assert name not in {row["name"].removeprefix("torch.npu: ") for row in STORED["found"]}


def test_sleep_mode_is_in_every_version_under_the_same_names():
    """So that the worker's calls are seen, which the simulated device cannot make."""
    for name in ("NPUWorker.sleep", "NPUWorker.wake_up"):
        found = versions_of(name)
        assert set(found) == set(VLLM_ASCEND)
        assert all(signature.startswith("(self") for signature in found.values()), found
