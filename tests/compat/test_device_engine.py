"""Step 7 of the kit for devices with the vLLM that travels, where there is PyTorch for CUDA and no card.

The release follows from torch's version, its files are fetched and unpacked, and a server starts from them, with the
worker extension, until the worker asks for a device. What follows only a device can show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.device import vllm_files
from highwater.terminal.demo.engine import ensure_environment
from tests.engines import ALL_RECIPES, ROOT, site_packages, with_modules_of_the_sidecar

TORCH = "2.11.0"
WITHOUT_CARD = ROOT / "tests" / "support" / "cuda_without_card"
OF_TORCH = (
    *("torch", "torchgen", "functorch", "triton", "nvidia", "cuda", "torchvision*", "sympy", "mpmath", "networkx"),
    *(
        "jinja2*",
        "markupsafe*",
        "fsspec*",
        "filelock*",
        "typing_extensions*",
        "numpy*",
        "PIL",
        "pillow*",
        "setuptools*",
    ),
    *("pkg_resources", "_distutils_hack", "packaging*", "torch-*", "triton-*"),
)
"""Whatever comes with PyTorch, and nothing of vLLM's."""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A Python that has PyTorch alone, and the path of the kit with a sidecar's modules."""
    folder = tmp_path_factory.mktemp("kit")
    engine = ensure_environment("0.23.0", recipes=ALL_RECIPES, announce=print)  # for its torch, built for CUDA
    has_torch = folder / "torch"
    has_torch.mkdir()
    for name in OF_TORCH:
        for found in site_packages(engine.root).glob(name):
            if not (has_torch / found.name).exists():
                (has_torch / found.name).symlink_to(found)
    venv.create(folder / "python", with_pip=False, symlinks=True)
    # Beside torch: vLLM looks for a card before it does anything, and would go no further.
    (site_packages(folder / "python") / "kit.pth").write_text(f"{has_torch}\n{WITHOUT_CARD}\n")
    path = with_modules_of_the_sidecar(engine, folder / "modules", python=folder / "python" / "bin" / "python")
    return folder / "python" / "bin" / "python", os.pathsep.join(map(str, path))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written as `make device-wheels` writes it, for this Python."""
    path = tmp_path_factory.mktemp("archive") / vllm_files.ARCHIVE
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    vllm_files.fetch(path, torch=TORCH, python=version, machine=os.uname().machine)
    return path


@pytest.fixture
def step(kit: tuple[Path, str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`step(folder)` runs step 7 in a folder, and returns its checks by name."""

    def run(folder: Path) -> dict[str, Any]:
        command = [str(kit[0]), "-m", "bench.device", "engine", "--device", "cpu", "--out", str(tmp_path)]
        environ = os.environ | {"PYTHONPATH": kit[1]}
        done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
        assert (tmp_path / "engine-cpu.json").exists(), done.stdout + done.stderr
        checks = json.loads((tmp_path / "engine-cpu.json").read_text("utf-8"))["checks"]
        return {check["name"]: check for check in checks}

    return run


def test_what_is_missing_is_named(step: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    starts = step(tmp_path)["starts"]
    assert starts["status"] == "skipped"
    assert "build/device-vllm.tar.xz is missing: `make device-wheels WHEELS_TORCH=2.11.0+cu130`" in starts["why"]
    assert "vLLM 0.26.0" in starts["why"]


def test_an_engine_without_kernels_starts_until_it_asks_for_a_device(
    step: Callable[..., dict[str, Any]], archive: Path
) -> None:
    starts = step(archive.parents[1])["starts"]
    assert (starts["status"], starts["why"]) == (
        "failed",
        "AssertionError: DP adjusted local rank 0 is out of bounds for 0 devices.",
    )


def test_the_archive_can_travel_with_the_tree(archive: Path) -> None:
    """Beside the tree of 10 MiB and the sidecar's wheels of 11, within 64."""
    assert archive.stat().st_size < 42 << 20
