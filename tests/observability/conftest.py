"""Debian's Prometheus and Alertmanager: the tools that judge, and servers that run beside a test."""

from __future__ import annotations

import os
import shutil

import pytest


def tool(name: str) -> str:
    """Where a program is. Without it a test is skipped, except where all of them must be there."""
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not there, and CI must have it: make tools")
        pytest.skip(f"{name} is not installed; make tools brings it")
    return found
