"""Texts that were read once and are kept in files beside their tests."""

from __future__ import annotations

import os
from pathlib import Path


def golden(path: Path, shown: str) -> str:
    """Return what is kept; after a change that is meant: HIGHWATER_GOLDEN=write pytest, and read it."""
    if os.environ.get("HIGHWATER_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    return path.read_text(encoding="utf-8")
