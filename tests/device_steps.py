"""A step of the kit for devices, run as a process, and what came of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEP_SECONDS = 1500


def passed(step: str, kind: str, folder: Path, *, python: Path, environ: Mapping[str, str]) -> set[str]:
    """Run a step, and return the checks that passed."""
    device = kind if kind == "cpu" else f"{kind}:0"
    done = subprocess.run(
        [str(python), "-m", "bench.device", step, "--device", device, "--out", str(folder)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=STEP_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written: dict[str, Any] = json.loads((folder / f"{step}-{kind}.json").read_text("utf-8"))
    by_status: dict[str, set[str]] = {}
    for check in written["checks"]:
        by_status.setdefault(check["status"], set()).add(check["name"])
    assert by_status.get("failed", set()) == set(), done.stdout + done.stderr
    assert all(check["why"] for check in written["checks"] if check["status"] == "skipped")
    return by_status["passed"]
