"""A simulated NPU for the processes of one test, and torch_npu for an engine's Python."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from highwater.terminal.demo.engine import EngineEnvironment, cache_dir
from highwater.terminal.demo.process import DemoError, signs_of_life
from tests.c_compiler import compiler, obstacle
from tests.fakes.cann.state import VARIABLE, new_state

TORCH_NPU = "2.13.0"
HERE = Path(__file__).parent
NEEDS_COMPILER = pytest.mark.skipif(bool(obstacle()), reason=str(obstacle()))
"""The mark of tests that run on it."""
# All one library: torch_npu links to the first five, and opens the others by name.
_NAMES = (
    *("ascendcl", "acl_op_compiler", "ge_runner", "graph", "hccl"),
    *("acl_tdt_channel", "opapi", "runtime"),
)


class SimulatedNpu:
    """Devices that processes share.

    Args:
        folder: Is made, and gets the stand-in's libraries and its state.
        engine: Has torch.
        total_bytes: The size of each device; nothing of it is taken from this machine before it is written.
        devices: How many, four at most.

    Raises:
        DemoError: There is no C compiler, or it fails.
    """

    def __init__(self, folder: Path, engine: EngineEnvironment, *, total_bytes: int, devices: int = 1) -> None:
        self._folder, self._engine, self.state = folder, engine, folder / "state"
        build(folder)
        new_state(self.state, total_bytes=total_bytes, devices=devices)

    def environ(self, *path: Path, announce: Callable[[str], None] = lambda _: None) -> dict[str, str]:
        """Return the variables of a process that has the devices, with further folders for `PYTHONPATH`."""
        torch_npu, folder = ensure_torch_npu(self._engine, announce), str(self._folder)
        return os.environ | {
            VARIABLE: str(self.state),
            "LD_LIBRARY_PATH": f"{folder}:{torch_npu / 'torch_npu' / 'lib'}",
            "ASCEND_HOME_PATH": folder,
            "ASCEND_OPP_PATH": folder,
            # Else copies wait in a thread of torch_npu's, and the kernels, which do not, overtake them.
            "TASK_QUEUE_ENABLE": "0",
            "OMP_NUM_THREADS": "1",  # beside other tests, threads that wait for each other cost most of the time
            # The kernels' results lie in host memory first: else each is mapped anew, and its pages cost more than it.
            **dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(256 << 20)),
            "PYTHONPATH": os.pathsep.join(map(str, (HERE / "on_path", torch_npu, *path))),
        }


def build(folder: Path) -> Path:
    """Compile the stand-in into a folder, made where it is missing, and return its library, `libascendcl.so`."""
    folder.mkdir(exist_ok=True)
    library = folder / f"lib{_NAMES[0]}.so"
    flags = ("-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
    if missing := obstacle():
        raise DemoError(f"the simulated NPU's stand-in for CANN is compiled where it runs, and {missing}")
    command = [*compiler(), *flags, "-o", str(library), *map(str, sorted(HERE.glob("*.c")))]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise DemoError(
            f"{command[0]} cannot compile the simulated NPU's stand-in for CANN, which takes the C library's "
            f"headers too (on Debian libc6-dev). It says:\n{error.stderr.strip()}"
        ) from error
    for name in _NAMES[1:]:
        (folder / f"lib{name}.so").symlink_to(library)
    for name in ("compiler", "opp", "runtime"):  # torch_npu looks for them at start
        (folder / name).mkdir()
    return library


def ensure_torch_npu(engine: EngineEnvironment, announce: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder with torch_npu, beside an engine's environment; fetched when it is missing, 45 MB."""
    return ensure_beside(engine, f"torch-npu-{TORCH_NPU}", (f"torch-npu=={TORCH_NPU}",), announce=announce)


def ensure_beside(
    engine: EngineEnvironment,
    name: str,
    requirements: Sequence[str],
    complete: Callable[[Path], None] = lambda _: None,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return a folder with packages for an engine's Python, which its environment lacks; made when it is missing."""
    key = hashlib.sha256(f"{' '.join(requirements)} {engine.root.name}".encode()).hexdigest()[:12]
    folder = cache_dir() / f"{name}-{key}"
    marker, log_path = folder / "complete", folder.parent / f"{folder.name}.log"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it with the file
        if not marker.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [str(engine.python), "-m", "pip", "--no-input", "--disable-pip-version-check", "install"]
            # With this process's PYTHONPATH pip would see packages that are not in the engine's environment.
            environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            announce(f"Installing {' '.join(requirements)} into {folder}, once (log {log_path}).")
            with log_path.open("w") as log, signs_of_life("installing", log_path, announce):
                command = [*pip, "--no-deps", "--target", str(folder), *requirements]
                if subprocess.run(command, env=environ, stdout=log, stderr=log, check=False).returncode != 0:
                    reason = f"{' '.join(requirements)} could not be installed: a package index must be reachable"
                    raise DemoError.with_log(reason, log_path)
                complete(folder)
            marker.touch()
    return folder
