"""Two ranks with the real vllm-ascend, each on a simulated NPU, and its sleep mode: with vllm-ascend's own allocator.

What the ranks exchange goes through the host, for there is no HCCL: tests/support/more_of_ascend.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from highwater.terminal.demo.engine import EngineEnvironment, build_model, cache_dir
from tests.engine.conftest import make_weights
from tests.engine.published import unpacked_source
from tests.engines import BYTES_PER_NUMBER, ENCODER_WIDTH, ROOT, image_tokens
from tests.fakes.cann.ascend import VLLM_ASCEND, environ_of_vllm_ascend
from tests.fakes.cann.npu import NEEDS_COMPILER, SimulatedNpu
from tests.own_engine.test_vllm_ascend import answers
from tests.support.on_vllm_ascend import IMAGES, SIDE
from tests.tested import Ran, confirm

NEEDS_CPLUSPLUS = pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler, c++; Debian's package is g++"
)
pytestmark = [pytest.mark.device, NEEDS_COMPILER, NEEDS_CPLUSPLUS]
RANKS = 2
TOTAL_BYTES = 2 << 30
ENTRY_BYTES = image_tokens(SIDE, SIDE) * ENCODER_WIDTH * BYTES_PER_NUMBER
MORE = ROOT / "tests" / "support" / "more_of_ascend"


def source_of_the_allocator() -> Path:
    """vllm-ascend's own, fetched with its source on first use."""
    kept = cache_dir() / f"vllm-ascend-{VLLM_ASCEND}-camem_allocator.cpp"
    if not kept.is_file():
        with unpacked_source("vllm_ascend", VLLM_ASCEND) as root:
            draft = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(root / "csrc" / "camem_allocator.cpp", draft)
            draft.rename(kept)
    return kept


def compile_the_allocator(engine: EngineEnvironment, cann: Path, folder: Path) -> None:
    """Write `vllm_ascend_C` into a folder; it is linked to the stand-in."""
    code = "import sysconfig; print(sysconfig.get_paths()['include'])"
    asked = subprocess.run([str(engine.python), "-c", code], capture_output=True, text=True, check=True)
    command = ["c++", "-shared", "-fPIC", "-O1", "-w", "-I", str(MORE / "include"), "-I", asked.stdout.strip()]
    command += [str(source_of_the_allocator()), "-o", str(folder / "vllm_ascend_C.so"), f"-L{cann}", "-lascendcl"]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, engine_environment: EngineEnvironment) -> dict[str, Any]:
    """What both ranks answered, from their start to the last answer."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    npu = SimulatedNpu(folder / "cann", engine_environment, total_bytes=TOTAL_BYTES, devices=RANKS)
    model = build_model(folder / "model")
    make_weights(engine_environment, model)
    compile_the_allocator(engine_environment, folder / "cann", folder)
    environ = environ_of_vllm_ascend(npu, engine_environment, folder, ROOT, MORE, folder)
    # Else each rank imports everything anew, ten seconds of a processor: no device is in use before they are made.
    environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    return answers(engine_environment, environ, model, folder, "ranks")


def test_each_rank_has_a_device_and_a_budget(seen: dict[str, Any]) -> None:
    started = seen["started"]
    assert [(one["tp_rank"], one["device"]["index"], one["notes"]) for one in started] == [(0, 0, []), (1, 1, [])]
    assert len({one["pid"] for one in started}) == RANKS
    budgets = [one["engine_budget"] for one in seen["budget"]]
    assert {one["ascend_version"] for one in budgets} == {VLLM_ASCEND}
    for memory, budget in zip(started, seen["budget"], strict=True):
        confirm(Ran.of_worker(memory, budget, __file__, is_simulated=seen["is_simulated"], ascend_version=VLLM_ASCEND))
    assert len({one["kv_cache"]["tensor_bytes"] for one in budgets}) == 1


def test_both_ranks_hold_the_encoder_outputs_and_trim_them(seen: dict[str, Any]) -> None:
    expected = (len(IMAGES), len(IMAGES) * ENTRY_BYTES)
    for asked, trim, trimmed, back in zip(seen["asked"], seen["trim"], seen["trimmed"], seen["back"], strict=True):
        cache = asked["encoder_cache"]
        assert (cache["entries"], cache["device_bytes"]) == expected
        assert (trim["spilled_entries"], trim["complete"], trim["notes"]) == (len(IMAGES), True, [])
        assert (trimmed["encoder_cache"]["device_bytes"], trimmed["encoder_cache"]["host_bytes"]) == (0, expected[1])
        assert back["encoder_cache"]["restores"] == len(IMAGES)
    assert seen["again"] == seen["first"]
    assert len(set(seen["first"])) == len(IMAGES)


def test_asleep_each_device_has_the_memory_back_that_weights_and_kv_cache_had(seen: dict[str, Any]) -> None:
    """And nothing of it is offered: what is asleep cannot be released or trimmed."""
    for before, asleep in zip(seen["back"], seen["asleep"], strict=True):
        assert sorted(asleep["asleep_tags"]) == ["kv_cache", "weights"]
        gone = before["used_bytes"] - asleep["used_bytes"]
        assert gone >= before["weights_bytes"] + before["kv_cache_bytes"]
        assert (asleep["releasable_bytes"], asleep["trimmable_bytes"]) == (0, None)


def test_awake_it_answers_as_before(seen: dict[str, Any]) -> None:
    for before, awake in zip(seen["back"], seen["awake"], strict=True):
        assert awake["asleep_tags"] == []
        assert awake["used_bytes"] >= before["weights_bytes"] + before["kv_cache_bytes"]
    assert seen["after"] == seen["first"]
