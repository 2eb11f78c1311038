"""vLLM's build for CUDA as the package index has it, where there is no driver: the plugin is loaded and says nothing.

No engine starts there: what the worker package does on a GPU is docs/devices.md's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from highwater.process.worker_package import copy_worker_package
from highwater.terminal.demo.engine import EngineEnvironment, ensure_environment
from tests.engines import CUDA_RECIPES, CUDA_VERSION
from tests.tested import Ran, confirm

PROBE = Path(__file__).with_name("cuda_probe.py")
DRIVER = re.compile(r"find library=(libcuda\.so|libnvidia-ml\.so)")
"""The dynamic linker's line for a library that is opened (`LD_DEBUG=libs`)."""


class Said(NamedTuple):
    """How a program ended, what it wrote, and which of NVIDIA's libraries it asked for."""

    status: int
    out: str
    log: list[str]
    asked_for: list[str]


@pytest.fixture(scope="module")
def cuda_environment() -> EngineEnvironment:
    """Some 10 GB, CUDA's libraries among them."""
    return ensure_environment(CUDA_VERSION, recipes=CUDA_RECIPES, announce=print)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_worker_package(tmp_path_factory.mktemp("plugin") / "package").folder


def ran(command: Sequence[str], folder: Path, *path: Path) -> Said:
    """Run a program of the environment with folders on its path, and return what it said."""
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HIGHWATER_"))}
    environ |= {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(folder / "linker"), "VLLM_NO_USAGE_STATS": "1"}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "VLLM_CACHE_ROOT": str(folder / "cache")}
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    notes = [note.read_text("utf-8", "replace") for note in folder.glob("linker.*")]
    asked = sorted(found for note in notes for found in DRIVER.findall(note))
    # Without day, time and process: of two runs these differ.
    lines = (re.sub(r"(\d\d-?\d\d )?\d\d:\d\d:\d\d(\.\d+ \d+)?", "", line) for line in done.stderr.splitlines())
    return Said(done.returncode, done.stdout, list(lines), asked)


@pytest.fixture(scope="module")
def probed(cuda_environment: EngineEnvironment, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`probed("load")` is what the probe said, with the package on its path, or without."""
    folder = tmp_path_factory.mktemp("probe")

    def probe(what: str, *, has_package: bool = True) -> Said:
        command = [str(cuda_environment.python), str(PROBE), what]
        said = ran(command, folder / f"{what}-{has_package}", *([package] if has_package else []))
        assert said.status == 0, said
        return said

    return probe


def test_the_plugin_is_loaded_in_silence_and_asks_for_no_driver(probed: Any) -> None:
    """It wraps the worker class; vLLM says the same and opens the same libraries as when that class is imported."""
    loaded, plain = probed("load"), probed("neither", has_package=False)
    found = json.loads(loaded.out.splitlines()[-1])
    assert (found["is_wrapped"], found["initialised"]) == (True, False)
    assert found["vllm"] == CUDA_VERSION
    assert found["cuda"]
    assert loaded.log == plain.log
    assert loaded.asked_for == plain.asked_for
    assert "highwater" not in "\n".join(loaded.log).lower()
    confirm(Ran.without_card(CUDA_VERSION, __file__))


def test_vllms_command_ends_as_without_the_package(
    cuda_environment: EngineEnvironment, package: Path, tmp_path: Path
) -> None:
    """Without a driver it knows no device and cannot even help; with the package beside it that is word for word so."""
    command = [str(cuda_environment.root / "bin" / "vllm"), "--help"]
    beside, alone = ran(command, tmp_path / "beside", package), ran(command, tmp_path / "alone")
    assert "Failed to infer device type" in "\n".join(alone.log)
    assert beside == alone


def test_the_extension_class_fits_beneath_vllms_worker_for_cuda(probed: Any) -> None:
    """No attribute is taken, which vLLM refuses at start; and it answers before there is a device."""
    found = json.loads(probed("extension").out.splitlines()[-1])
    assert (found["taken"], found["ok"], found["op"]) == ([], True, "memory")
    assert found["initialised"] is False
