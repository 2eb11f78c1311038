"""One version, wherever it is stated; and one command that writes it everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import highwater
from highwater_worker.wire import EXTENSION_VERSION
from release.version import PLACES, ROOT, current, semver, write

STATES = re.compile(rf"(?<![\d.]){re.escape(current())}(?![\d.])")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for place in PLACES:
        (tmp_path / place.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place.file, tmp_path / place.file)
    return tmp_path


def test_every_place_states_the_same_version():
    assert current() == highwater.__version__ == EXTENSION_VERSION


def test_no_file_of_a_release_states_it_where_nobody_looks():
    """A place that is not in the table would stay behind."""
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    known = {place.file for place in PLACES}
    # Answers and examples that were recorded, and a version of vLLM's.
    others = {"app/highwater/process/worker_package.py", "tests/unit/terminal/test_plan.py"}
    kinds = (".py", ".toml", ".md", ".yaml", "Dockerfile")
    own = [name for name in tracked if name.endswith(kinds) and not name.startswith(("tests/", "CHANGELOG", "RELEAS"))]
    found = {name for name in own if STATES.search((ROOT / name).read_text(encoding="utf-8"))}
    assert found - known - others == set()


@pytest.mark.parametrize("version", ["1.2.3", "2.0.0rc1"])
def test_one_command_writes_it_everywhere(copy, version):
    changed = write(version, copy)
    assert current(copy) == version
    assert set(changed) == {place.file for place in PLACES}
    assert [name for name in changed if STATES.search((copy / name).read_text())] == []
    assert f"\nversion: {semver(version)}\n" in (copy / "helm/Chart.yaml").read_text()
    write(current(), copy)
    assert {name: (copy / name).read_text() for name in changed} == {
        name: (ROOT / name).read_text() for name in changed
    }
