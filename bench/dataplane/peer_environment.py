"""A virtual environment for a peer from the package index: built once per set of requirements, kept in the cache."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from app.demo.environment import cache_dir
from app.demo.errors import DemoError

MARKER = "complete"


def peer_environment(name: str, requirements: tuple[str, ...]) -> Path:
    """Return the environment's folder of programs.

    Args:
        name: Of the peer.
        requirements: For pip; versions named, so that two runs compare the same.

    Raises:
        DemoError: It cannot be installed here.
    """
    ingredients = " ".join((*requirements, platform.python_version(), platform.machine()))
    root = cache_dir() / f"peer-{name}-{hashlib.sha256(ingredients.encode()).hexdigest()[:12]}"
    if not (root / MARKER).exists():
        print(f"  installing {name} into {root} ...", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        pip = [str(root / "bin" / "pip"), "--no-input", "--disable-pip-version-check"]
        for command in ([sys.executable, "-m", "venv", str(root)], [*pip, "install", *requirements]):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                last = (result.stderr or result.stdout).strip().splitlines()[-1:]
                raise DemoError(f"installing it failed: {' '.join(last)}")
        (root / MARKER).touch()
    return root / "bin"
