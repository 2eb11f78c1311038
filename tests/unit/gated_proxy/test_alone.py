"""gated_proxy stands alone: its tests pass where no other package of ours can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
WITHOUT_OURS = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(("highwater", "highwater_worker", "kvplan")))
import gated_proxy, pytest
for module in pkgutil.iter_modules(gated_proxy.__path__):
    importlib.import_module("gated_proxy." + module.name)
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_its_tests_pass_where_nothing_else_of_ours_can_be_imported() -> None:
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'app'}{os.pathsep}{ROOT}"}
    environ = {name: value for name, value in environ.items() if not name.startswith(("COV", "PYTEST"))}
    command = [sys.executable, "-c", WITHOUT_OURS, "--noconftest", "-q", "-p", "no:cacheprovider"]
    # What draws its values at random imports no more than the others, and takes most of the time.
    command += ["-m", "not hypothesis", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    command += [str(HERE), "--ignore", __file__]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
