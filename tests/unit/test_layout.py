"""The map: source roots, tests beside what they test, and names that are ours alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from highwater import __version__

ROOT = Path(__file__).resolve().parents[2]
APP, WORKER = ROOT / "app", ROOT / "worker_ext"
TESTS = Path(__file__).parent
BIN = Path(sys.executable).parent
# Folders of tests that mirror none of the sidecar's: other packages'.
OTHER_FOLDERS = {"worker_ext", "gated_proxy", "kvplan"}
ENTRY_POINTS = {
    "the console script": [str(BIN / "highwater"), "--version"],
    "the module": [sys.executable, "-m", "highwater", "--version"],
    "the worker extension": [
        *(sys.executable, "-c"),
        "import highwater_worker as w; print(w.MemoryExtension.__name__, 'version', w.__file__)",
    ],
}


def test_a_source_root_holds_our_packages():
    packages = [path.name for root in (APP, WORKER) for path in root.iterdir() if path.is_dir()]
    ours = {"highwater", "gated_proxy", "kvplan", "highwater_worker"}
    assert {name for name in packages if name != "__pycache__"} == ours
    assert not [path for root in (APP, WORKER) for path in root.glob("*.py")]


def test_the_tests_mirror_the_tree():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    ours = {folder for folder in folders if folder.parts and folder.parts[0] not in OTHER_FOLDERS}
    assert [str(folder) for folder in sorted(ours) if not (APP / "highwater" / folder).is_dir()] == []
    workers = {folder.relative_to("worker_ext") for folder in folders if folder.parts[:1] == ("worker_ext",)}
    assert [str(folder) for folder in sorted(workers) if not (WORKER / "highwater_worker" / folder).is_dir()] == []


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder of somebody else's, with packages that are called as our folders are, and end whoever imports them."""
    for name in ("app", "worker_ext", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a foreign package was imported')\n")
    for name in ("app", "worker_ext"):
        (tmp_path / name / "cli.py").write_text("raise SystemExit('a foreign module was imported')\n")
    return tmp_path


@pytest.mark.parametrize("command", ENTRY_POINTS.values(), ids=list(ENTRY_POINTS))
@pytest.mark.parametrize("where", ["in the repository", "in a foreign folder", "with a foreign folder on the path"])
def test_a_foreign_app_folder_harms_nothing(command: list[str], where: str, foreign: Path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if where == "with a foreign folder on the path":
        environ["PYTHONPATH"] = str(foreign)
    folder = ROOT if where == "in the repository" else foreign
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "version" in done.stdout
    assert __version__ in done.stdout or str(WORKER) in done.stdout
