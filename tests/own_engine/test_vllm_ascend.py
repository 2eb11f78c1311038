"""The worker package beside vLLM with the real vllm-ascend, over a simulated NPU (tests/fakes/cann).

Platform, worker and model runner are vllm-ascend's, the allocator torch_npu's; operators are computed on the CPU.
docs/devices.md says what a simulated device cannot show.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from highwater.explain.budget import rank_budget
from highwater.model.engine_budget import EngineBudget
from highwater.terminal.demo.engine import EngineEnvironment, build_model
from tests.engine.conftest import make_weights
from tests.engines import BYTES_PER_NUMBER, ENCODER_WIDTH, ROOT, image_tokens
from tests.fakes.cann.ascend import VLLM, VLLM_ASCEND, environ_of_vllm_ascend
from tests.fakes.cann.npu import NEEDS_COMPILER, TORCH_NPU, SimulatedNpu
from tests.support.on_vllm_ascend import IMAGES, SEEN, SIDE, UTILIZATION
from tests.tested import Ran, confirm
from tests.unit.explain.readings import rank

pytestmark = [pytest.mark.device, NEEDS_COMPILER]
TOTAL_BYTES = 2 << 30
ENTRY_BYTES = image_tokens(SIDE, SIDE) * ENCODER_WIDTH * BYTES_PER_NUMBER


def answers(
    engine: EngineEnvironment, environ: dict[str, str], model: Path, folder: Path, *more: str
) -> dict[str, Any]:
    """Return what tests/support/on_vllm_ascend.py is told by the worker, in a process of its own."""
    command = [str(engine.python), "-m", "tests.support.on_vllm_ascend", str(model), str(folder), *more]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads((folder / SEEN).read_text("utf-8"))
    return told


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment) -> dict[str, Any]:
    """What the worker answered, from its start to the last operation."""
    folder: Path = tmp_path_factory.mktemp("ascend")
    npu = SimulatedNpu(folder / "cann", engine_environment, total_bytes=TOTAL_BYTES)
    model = build_model(folder / "model")
    make_weights(engine_environment, model)
    return answers(engine_environment, environ_of_vllm_ascend(npu, engine_environment, folder, ROOT), model, folder)


def test_platform_worker_and_runner_are_vllm_ascends(seen: dict[str, Any]) -> None:
    """Else everything below would be about others."""
    assert seen["types"] == [
        "vllm_ascend.platform.NPUPlatform",
        "vllm_ascend.worker.worker.NPUWorker",
        "vllm_ascend.worker.model_runner_v1.NPUModelRunner",
    ]
    assert seen["started"]["notes"] == []


def test_versions_are_known(seen: dict[str, Any]) -> None:
    budget = seen["budget"]["engine_budget"]
    assert (budget["vllm_version"], budget["ascend_version"]) == (VLLM, VLLM_ASCEND)
    assert budget["torch_npu_version"].startswith(TORCH_NPU)
    started, is_simulated = seen["started"], seen["is_simulated"]
    confirm(Ran.of_worker(started, seen["budget"], __file__, is_simulated=is_simulated, ascend_version=VLLM_ASCEND))


def test_each_phase_of_the_start_was_seen(seen: dict[str, Any]) -> None:
    phases = {phase["name"]: phase for phase in seen["budget"]["start"]}
    assert list(phases) == ["before", "init", "weights", "profile", "kv_cache", "warm_up"]
    assert all(phase["error"] is None for phase in phases.values())
    grown = phases["kv_cache"]["allocated_bytes"] - phases["profile"]["allocated_bytes"]
    assert grown >= seen["budget"]["engine_budget"]["kv_cache"]["tensor_bytes"]


def test_the_budget_is_exact(seen: dict[str, Any]) -> None:
    engine = TypeAdapter(EngineBudget).validate_python(seen["budget"]["engine_budget"])
    budget = rank_budget(engine, rank(total=TOTAL_BYTES))
    parts = {part.key: part.bytes for part in budget.parts}
    assert (budget.counting, budget.requested_bytes) == ("parts", TOTAL_BYTES * UTILIZATION)
    assert sum(parts.values()) == budget.requested_bytes
    assert not parts.keys() & {"mm_ipc", "rescaled", "unexplained"}
    assert parts["kv_cache"] + parts["null_block"] == seen["started"]["kv_cache_bytes"]
    assert min(parts["weights"], parts["activation"]) > 0


def test_components_are_the_devices_use(seen: dict[str, Any]) -> None:
    for memory in (seen["started"], seen["asked"], seen["trimmed"], seen["back"]):
        assert memory["used_bytes"] == memory["torch"]["reserved_bytes"]
        known = memory["weights_bytes"] + memory["kv_cache_bytes"] + memory["encoder_cache"]["device_bytes"]
        assert known < memory["torch"]["allocated_bytes"]


def test_the_encoder_cache_holds_what_was_asked_about(seen: dict[str, Any]) -> None:
    cache, encoder = seen["asked"]["encoder_cache"], seen["budget"]["engine_budget"]["encoder"]
    assert (cache["entries"], cache["device_bytes"]) == (len(IMAGES), len(IMAGES) * ENTRY_BYTES)
    assert cache["capacity_embeds"] == encoder["cache_size"]
    assert {entry["bytes"] for entry in seen["entries"]["entries"]} == {ENTRY_BYTES}


def test_a_trim_frees_the_outputs_and_access_brings_them_back(seen: dict[str, Any]) -> None:
    trim, before, after = seen["trim"], seen["asked"]["torch"], seen["trimmed"]["torch"]
    assert (trim["spilled_entries"], trim["complete"], trim["notes"]) == (len(IMAGES), True, [])
    freed = before["allocated_bytes"] - after["allocated_bytes"]
    assert freed >= len(IMAGES) * ENTRY_BYTES - trim["encoder_cache"]["restore_reserve_bytes"]
    cache = seen["back"]["encoder_cache"]
    assert (cache["restores"], cache["device_bytes"]) == (len(IMAGES), len(IMAGES) * ENTRY_BYTES)
    assert seen["same"]
    assert seen["again"] == seen["first"]
    assert len(set(seen["first"])) == len(IMAGES)


def test_a_reset_empties_the_cache(seen: dict[str, Any]) -> None:
    cache = seen["reset"]["encoder_cache"]
    assert (cache["entries"], cache["device_bytes"], cache["host_bytes"]) == (0, 0, 0)


def test_a_release_gives_back_what_was_foretold_to_the_byte(seen: dict[str, Any]) -> None:
    foretold, release = seen["reset"]["releasable_bytes"], seen["release"]
    assert foretold > 0
    assert (release["freed_bytes"], seen["given_back_bytes"]) == (foretold, foretold)
    assert release["after"]["allocated_bytes"] == release["before"]["allocated_bytes"]
