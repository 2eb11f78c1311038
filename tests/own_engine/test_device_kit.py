"""The kit for devices, with real tensors on a CPU: each of its steps runs, and what only a device can show is skipped.

PyTorch is in the engine's environment. The sidecar that two of the steps start needs modules that only the sidecar has.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.device.steps import STEPS
from highwater.terminal.demo.engine import EngineEnvironment
from tests.device_steps import passed
from tests.engines import with_modules_of_the_sidecar

pytestmark = pytest.mark.device
# A real engine is started by other tests of this folder.
SHORT = [name for name in STEPS if name != "engine"]
JUDGED = {
    "reading": {"weights", "kv_cache", "encoder_cache", "components_fit", "neighbour_not_ours", "sample_cost"},
    "allocator": {"no_invented_figure", "release_answers"},
    "spill": {"identical", "identical_pageable", "views_go_together", "tuples_stay", "host_budget"},
    "under-load": {"results", "entries", "operations", "trims_moved", "snapshot_refused", "release_computes"},
    "oom": {"died", "incident", "verdict"},
    "policy": {"is_read", "held_on_cpu"},
}
"""Checks that a CPU can make: were they skipped, nothing would keep the step alive."""


@pytest.fixture
def path(tmp_path: Path, engine_environment: EngineEnvironment) -> str:
    """The kit, and the sidecar's modules that the engine's environment lacks."""
    return os.pathsep.join(map(str, with_modules_of_the_sidecar(engine_environment, tmp_path / "modules")))


@pytest.mark.parametrize("step", SHORT)
def test_a_step_passes_on_a_cpu(step: str, tmp_path: Path, path: str, engine_environment: EngineEnvironment):
    environ = os.environ | {"PYTHONPATH": path}
    assert passed(step, "cpu", tmp_path, python=engine_environment.python, environ=environ) >= JUDGED[step]
