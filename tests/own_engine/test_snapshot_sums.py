"""What we say of a memory snapshot is what PyTorch's own tools say of it, those that the engine's PyTorch brings."""

from __future__ import annotations

import importlib.util
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings

from highwater.demo.environment import ensure_environment
from highwater.snapshots.explanation import explain, sums_of
from highwater.snapshots.model import parse
from tests.unit.snapshots.made import fragmented, snapshots

pytestmark = pytest.mark.engine
_STATES = {"active_allocated": "allocated", "active_pending_free": "pending", "inactive": "free"}


@pytest.fixture(scope="session")
def viewer() -> ModuleType:
    """`torch/cuda/_memory_viz.py` of the engine's environment; it needs nothing of torch for a snapshot."""
    environment = ensure_environment()
    (path,) = environment.root.glob("lib/python3*/site-packages/torch/cuda/_memory_viz.py")
    spec = importlib.util.spec_from_file_location("memory_viz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flame_sums(viewer: ModuleType, raw: dict[str, Any]) -> Counter[tuple[str, str]]:
    """The bytes of each stream and state in PyTorch's flame graph."""
    sums: Counter[tuple[str, str]] = Counter()
    for line in viewer.memory(raw, format_flamegraph=lambda lines: lines).splitlines():
        stack, _, size = line.rpartition(" ")
        stream, state = stack.split(";")[:2]
        sums[stream, _STATES[state]] += int(size)
    return sums


@settings(max_examples=60, deadline=None)
@given(raw=snapshots())
def test_pools_sum_to_what_pytorchs_flame_graph_shows(viewer, raw):
    """Allocated, pending and free, stream by stream, to the byte."""
    ours: Counter[tuple[str, str]] = Counter()
    for device in explain(parse(raw))["devices"]:
        for pool in device["pools"]:
            for state in _STATES.values():
                ours[f"stream_{pool['stream']}", state] += pool[f"{state}_bytes"]
    assert +ours == +flame_sums(viewer, raw)


@settings(max_examples=60, deadline=None)
@given(raw=snapshots())
def test_the_whole_is_what_pytorchs_summary_shows(viewer, raw):
    """Reserved, requested and free, in its own words; it counts what waits for a stream as free."""
    sums = sums_of(parse(raw).segments)
    text = viewer.segsum(raw)
    assert f"total_reserved: {viewer.Bytes(sums.reserved)}\n" in text
    assert f"total_allocated: {viewer.Bytes(sums.allocated - sums.rounding)}\n" in text
    assert f"total_free: {viewer._report_free(sums.free + sums.pending, sums.rounding)}\n" in text


def test_the_reported_pattern_sums_alike(viewer):
    """59.38 GiB reserved, 54.77 allocated."""
    text = viewer.segsum(fragmented())
    assert "total_reserved: 59.4GiB\ntotal_allocated: 54.8GiB\ntotal_free: 4.6GiB" in text
