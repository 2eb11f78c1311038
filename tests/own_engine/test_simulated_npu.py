"""The worker package on the real torch_npu, over a simulated NPU (tests/fakes/cann).

docs/devices.md says what a simulated device cannot show.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from highwater.diagnose.log.story import story_of
from highwater.terminal.demo.engine import EngineEnvironment
from tests.device_steps import passed
from tests.engines import with_modules_of_the_sidecar
from tests.fakes.cann.npu import NEEDS_COMPILER, TORCH_NPU, SimulatedNpu, build
from tests.fakes.cann.state import VARIABLE, new_state, set_state

pytestmark = [pytest.mark.device, NEEDS_COMPILER]
GIB = 1 << 30
JUDGED = {
    "reading": {
        *("weights", "kv_cache", "encoder_cache", "components_fit", "non_torch", "allocated_follows", "used_follows"),
        *("neighbour_in_used", "neighbour_not_ours", "neighbour_same_device", "sample_cost"),
    },
    "allocator": {"foretold_first", "foretold_later", "driver_gets_it", "tensors_stay", "private_pools_kept"},
    "spill": {
        *("identical", "identical_pageable", "views_go_together", "given_back", "pinned", "access_brings_back"),
        *("no_room_makes_room", "no_room_fails_cleanly", "host_budget", "host_budget_none"),
    },
    "under-load": {"results", "entries", "operations", "trims_moved", "snapshot", "release_computes"},
    "oom": {"died", "recognised", "full", "fragment", "workspace", "incident", "verdict"},
}
"""Checks that a simulated device can make."""


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment) -> SimulatedNpu:
    return SimulatedNpu(tmp_path_factory.mktemp("npu") / "cann", engine_environment, total_bytes=8 * GIB)


@pytest.fixture(scope="module")
def environ(
    npu: SimulatedNpu, tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment
) -> dict[str, str]:
    modules = tmp_path_factory.mktemp("path") / "modules"
    return npu.environ(*with_modules_of_the_sidecar(engine_environment, modules))


@pytest.mark.parametrize("step", JUDGED)
def test_a_step_of_the_device_kit_passes(
    step: str, tmp_path: Path, environ: dict[str, str], engine_environment: EngineEnvironment
):
    assert passed(step, "npu", tmp_path, python=engine_environment.python, environ=environ) >= JUDGED[step]


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str], engine_environment: EngineEnvironment
) -> dict[str, Any]:
    """What a worker saw while faults were ordered, one after another."""
    folder = tmp_path_factory.mktemp("seen")
    command = [str(engine_environment.python), "-m", "tests.support.on_simulated_npu", str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text("utf-8"))
    return answers


def test_versions_are_those_of_torch_npu(seen: dict[str, Any]):
    budget = seen["budget"]["engine_budget"]
    assert budget["torch_npu_version"].startswith(TORCH_NPU)
    assert (seen["memory"]["device"]["type"], budget["ascend_version"]) == ("npu", None)


def test_a_snapshot_is_written(seen: dict[str, Any]):
    assert seen["snapshot"]["segments"] > 0
    assert seen["snapshot"]["trace_entries"] > 0
    assert Path(seen["snapshot"]["path"]).stat().st_size > 0


def test_a_trim_over_a_slow_link_keeps_to_its_time(seen: dict[str, Any]):
    slow = seen["slow"]
    assert (slow["complete"], 0 < slow["spilled_entries"] < 8) == (False, True)


def test_the_message_of_a_full_device_is_known(seen: dict[str, Any]):
    (message,) = story_of([f"(EngineCore pid=1) ERROR torch.OutOfMemoryError: {seen['message']}"]).messages
    assert "out_of_memory" in message.name


def test_a_lost_device_raises_nothing_and_loses_no_entry(seen: dict[str, Any]):
    assert {op: type(answer["ok"]) for op, answer in seen["lost"].items()} == dict.fromkeys(seen["lost"], bool)
    assert seen["lost"]["memory"].get("used_bytes") is None
    assert seen["same"]


# --- the stand-in itself ---

_TAKES = "import ctypes, sys; cann = ctypes.CDLL(sys.argv[1]); cann.aclrtSetDevice(0); at = ctypes.c_void_p(); " \
    "print(cann.aclrtMalloc(ctypes.byref(at), ctypes.c_size_t(1 << 30), 0), flush=True); sys.stdin.read()"  # fmt: skip


def test_memory_of_a_killed_process_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library, state = build(tmp_path), tmp_path / "state"
    new_state(state, total_bytes=4 * GIB, devices=1)
    monkeypatch.setenv(VARIABLE, str(state))
    cann = ctypes.CDLL(str(library))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def free_bytes() -> int:
        assert cann.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value

    assert cann.aclrtSetDevice(0) == 0
    with subprocess.Popen(
        [sys.executable, "-c", _TAKES, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert (other.stdout.readline().strip(), free_bytes()) == ("0", 3 * GIB)
        other.kill()
    assert free_bytes() == 4 * GIB
    set_state(state, refused_from_bytes=1)
    assert cann.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1), 0) == 207001
