"""The newest final release of vllm-ascend, 0.23.0.post1, held to the same as test_vllm_ascend.py.

On the same simulated NPU, under vLLM 0.23.0; it wants torch_npu 2.10 and runs with that of the stand-in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from highwater.terminal.demo.engine import EngineEnvironment, build_model
from tests.engine.conftest import make_weights
from tests.engines import ROOT
from tests.fakes.cann.ascend import Release, environ_of_vllm_ascend
from tests.fakes.cann.npu import NEEDS_COMPILER, SimulatedNpu
from tests.own_engine.test_vllm_ascend import (
    TOTAL_BYTES,
    answers,
    test_a_release_gives_back_what_was_foretold_to_the_byte,
    test_a_reset_empties_the_cache,
    test_a_trim_frees_the_outputs_and_access_brings_them_back,
    test_components_are_the_devices_use,
    test_each_phase_of_the_start_was_seen,
    test_platform_worker_and_runner_are_vllm_ascends,
    test_the_budget_is_exact,
    test_the_encoder_cache_holds_what_was_asked_about,
)
from tests.tested import Ran, confirm

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
pytestmark = [pytest.mark.device, NEEDS_COMPILER]
# It has that kernel from a later release on.
RELEASE = Release("0.23.0", "0.23.0.post1", ("scipy==1.16.3", "gguf==0.19.0"), "ops/triton/compute_slot_mapping.py")
OLDER = ROOT / "tests" / "support" / "older_ascend"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment) -> dict[str, Any]:
    """What the worker answered, from its start to the last operation."""
    folder: Path = tmp_path_factory.mktemp("older")
    npu = SimulatedNpu(folder / "cann", engine_environment, total_bytes=TOTAL_BYTES)
    model = build_model(folder / "model")
    make_weights(engine_environment, model)
    environ = environ_of_vllm_ascend(npu, engine_environment, folder, ROOT, OLDER, release=RELEASE)
    return answers(engine_environment, environ, model, folder)


def test_versions_are_known(seen: dict[str, Any]) -> None:
    budget = seen["budget"]["engine_budget"]
    assert (budget["vllm_version"].partition("+")[0], budget["ascend_version"]) == RELEASE[:2]
    release, is_simulated = RELEASE.vllm_ascend, seen["is_simulated"]
    confirm(Ran.of_worker(seen["started"], seen["budget"], __file__, is_simulated=is_simulated, ascend_version=release))
