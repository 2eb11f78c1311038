"""What people install is a wheel: it must hold everything that runs, and nothing that is ours alone."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("vllm_highwater-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_of_both_packages_is_in_the_wheel(names: set[str]) -> None:
    """The demonstration's shim and the type markers too."""
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("app", "worker_ext")
        for path in (ROOT / package).rglob("*.py")
    }
    assert "app/demo/shim/sitecustomize.py" in modules
    assert modules | {"app/py.typed", "worker_ext/py.typed"} <= names


def test_nothing_else_is_installed_at_the_top_level(names: set[str]) -> None:
    """No tests, no benchmarks, no folder of the repository's own."""
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"app", "worker_ext"}


def test_the_console_script_is_there(names: set[str]) -> None:
    """`highwater` is what people type."""
    assert any(name.endswith("entry_points.txt") for name in names)
