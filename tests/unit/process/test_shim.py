"""The engine's `sitecustomize` stays out of the way until torchvision is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from highwater.process.worker_package import SHIM_FOLDER

if TYPE_CHECKING:
    from pathlib import Path


def run(code: str, *folders: Path) -> str:
    """Run code in a fresh interpreter that finds the shim first, then the modules in `folders`."""
    path = os.pathsep.join(map(str, (SHIM_FOLDER, *folders)))
    environ = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout


def test_the_sitecustomize_that_it_hides_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hidden one')")
    assert run("print('program')", tmp_path) == "hidden one\nprogram\n"


def test_starting_python_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    assert run("import sys; print('torch' in sys.modules)", tmp_path) == "False\n"


FAKE_TORCH = """
class ops:
    def load_library(path):
        {load}
class library:
    class Library:
        def __init__(self, *names): print(*names)
        def define(self, schema): print(schema.split("(")[0])
"""


def fake_packages(folder: Path, *, load: str) -> Path:
    (folder / "torch.py").write_text(FAKE_TORCH.format(load=load))
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text("print('torchvision')")
    return folder


def test_the_operators_are_declared_before_torchvision_runs(tmp_path: Path) -> None:
    folder = fake_packages(tmp_path, load="raise OSError('a CUDA build')")
    assert run("import torchvision", folder).split() == ["torchvision", "DEF", "nms", "qnms", "torchvision"]


def test_nothing_is_declared_where_torchvisions_library_loads(tmp_path: Path) -> None:
    folder = fake_packages(tmp_path, load="pass")
    assert run("import torchvision", folder).split() == ["torchvision"]
