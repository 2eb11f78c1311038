"""The sidecar with its data plane compiled, as its wheel installs it: built once for each state of the sources.

It never builds in the tree: what mypyc leaves beside a module is imported instead of it, whatever the module says by
then. A build is one copy of the sources, named by what is in that copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from highwater.terminal.demo.engine import cache_dir
from highwater.terminal.demo.process import DemoError
from tests import c_compiler

ROOT = Path(__file__).parents[1]
SOURCES = ("app", "docs/runbooks", "pyproject.toml", "README.md", "LICENSE")  # what a wheel is made of
KEPT = 3


def obstacle() -> str | None:
    """What is missing for a build here, in a sentence; None where nothing is."""
    if missing := c_compiler.obstacle():
        return f"the data plane cannot be compiled: {missing}"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"the data plane cannot be compiled: {header} is missing; Debian's package is python3-dev"
    return None


def compiled_app(announce: Callable[[str], None] = lambda _: None) -> Path:
    """Return a folder with `highwater` in it, its data plane compiled: now, or earlier from the same sources."""
    if missing := obstacle():
        raise DemoError(missing)
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "compiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it with the file
        built = cache / _name(ROOT)
        if not built.exists():
            announce("Compiling the data plane: half a minute, once for each state of the sources.")
            built = _build(cache)
        built.touch()
        _forget_old(cache)
    return built


def environ_for(built: Path) -> Mapping[str, str]:
    """What lets a process import `highwater` from there, wherever it is started and whatever is installed."""
    return {"PYTHONPATH": str(built), "PYTHONSAFEPATH": "1"}  # or `python -m` would look where it is started, first


def _name(tree: Path) -> str:
    digest = hashlib.sha256()
    versions = (platform.python_version(), platform.machine(), importlib.metadata.version("mypy"))
    for path in (*sorted((tree / "app").rglob("*.py")), tree / "pyproject.toml"):
        digest.update(b"%b\0%b\0" % (path.relative_to(tree).as_posix().encode(), path.read_bytes()))
    digest.update("\0".join(versions).encode())
    return f"compiled-{digest.hexdigest()[:12]}"


def _build(cache: Path) -> Path:
    work = cache / "compiling"  # one name, under the lock: the next build removes what a killed one left
    shutil.rmtree(work, ignore_errors=True)
    tree, wheels, draft = work / "tree", work / "wheels", work / "draft"
    tree.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, tree / name)
    # By the copy: somebody may have saved a file since the other look.
    built = cache / _name(tree)
    if not built.exists():
        _pip_wheel(tree, wheels, cache / "compiled.log")
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            # Without its metadata: the tree's own is installed.
            ours = ("highwater/", "gated_proxy/", "kvplan/")
            wanted = [name for name in archive.namelist() if name.startswith(ours) or "__mypyc." in name]
            archive.extractall(draft, wanted)
        draft.rename(built)  # in one piece: a folder of this name is complete
    shutil.rmtree(work)
    return built


def _pip_wheel(tree: Path, wheels: Path, log_path: Path) -> None:
    """Build the wheel as an operator does, in pip's own environment, but by the mypy that checks our types."""
    constraints = tree.parent / "constraints.txt"
    constraints.write_text(f"mypy=={importlib.metadata.version('mypy')}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "wheel", "--no-deps"]
    command += ["--wheel-dir", str(wheels), str(tree)]
    environ = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    environ |= {
        "CC": shlex.join(c_compiler.compiler()),
        "HATCH_BUILD_HOOKS_ENABLE": "1",
        "PIP_BUILD_CONSTRAINT": str(constraints),
    }
    with log_path.open("w") as log:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ, check=False
        ).returncode
    if status != 0:
        raise DemoError.with_log(f"compiling the data plane failed with status {status}", log_path)


def _forget_old(cache: Path) -> None:
    """Keep those used last: some process may still run from one."""
    folders = [path for path in cache.glob("compiled-*") if path.is_dir()]
    for path in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(path)
