"""The alerts and recording rules as they stand in helm/alerts/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ALERTS_FILE = ROOT / "helm" / "alerts" / "highwater.rules.yaml"
RECORDINGS_FILE = ROOT / "helm" / "alerts" / "highwater-recording.rules.yaml"


def group_of(path: Path) -> dict[str, Any]:
    """A file's only group of rules."""
    (group,) = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return group


ALERTS: list[dict[str, Any]] = group_of(ALERTS_FILE)["rules"]
RECORDINGS: list[dict[str, Any]] = group_of(RECORDINGS_FILE)["rules"]
