"""The kit for devices, with real tensors on a CPU: each of its steps runs, and what only a device can show is skipped.

PyTorch is in the engine's environment. The sidecar that two of the steps start needs modules that only the sidecar has.
"""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.device.needs import NEEDS
from bench.device.steps import STEPS

if TYPE_CHECKING:
    from highwater.demo.environment import EngineEnvironment

pytestmark = pytest.mark.long("device")
ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 1500
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
def modules(tmp_path: Path, engine_environment: EngineEnvironment) -> Path:
    """A folder with the sidecar's modules that the engine's environment lacks."""
    code = f"from bench.device.needs import missing; print(*missing({[*NEEDS['policy'], 'h11']}))"
    lacking = subprocess.run(
        [str(engine_environment.python), "-c", code], capture_output=True, text=True, check=True, env=_environ()
    )
    folder = tmp_path / "modules"
    folder.mkdir()
    for name in lacking.stdout.split():
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found = Path(spec.origin)
        source = found.parent if found.name == "__init__.py" else found
        (folder / source.name).symlink_to(source)
    return folder


def _environ(*more: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT / "app", ROOT / "worker_ext", ROOT, *more)))
    return os.environ | {"PYTHONPATH": path}


@pytest.mark.parametrize("step", SHORT)
def test_a_step_passes_on_a_cpu(step: str, tmp_path: Path, modules: Path, engine_environment: EngineEnvironment):
    """No check fails, those that a CPU can make are made, and each that is skipped says why."""
    command = [str(engine_environment.python), "-m", "bench.device", step, "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=_environ(modules), capture_output=True, text=True, timeout=STEP_SECONDS, check=False
    )
    written: dict[str, Any] = json.loads((tmp_path / f"{step}-cpu.json").read_text("utf-8"))
    by_status: dict[str, set[str]] = {}
    for check in written["checks"]:
        by_status.setdefault(check["status"], set()).add(check["name"])
    assert by_status.get("failed", set()) == set(), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert by_status["passed"] >= JUDGED[step]
    assert all(check["why"] for check in written["checks"] if check["status"] == "skipped")
