"""Debian's Prometheus and Alertmanager: the tools that judge, and servers that run beside a test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[2] / "docs"


def tool(name: str) -> str:
    """Where a program is. Without it a test is skipped, except where all of them must be there."""
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not there, and CI must have it: make tools")
        pytest.skip(f"{name} is not installed; make tools brings it")
    return found


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def yaml_blocks(page: str, key: str) -> list[dict[str, Any]]:
    """Those of a page under docs/ that have a key at the top."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = map(yaml.safe_load, re.findall(r"^ *```yaml\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL))
    return [block for block in blocks if key in block]
