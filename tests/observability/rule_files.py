"""The alerts and recording rules as they stand in helm/alerts/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ALERTS_FILE = ROOT / "helm" / "alerts" / "highwater.rules.yaml"
RECORDINGS_FILE = ROOT / "helm" / "alerts" / "highwater-recording.rules.yaml"


def group_of(path: Path) -> dict[str, Any]:
    (group,) = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return group


ALERTS: list[dict[str, Any]] = group_of(ALERTS_FILE)["rules"]
RECORDINGS: list[dict[str, Any]] = group_of(RECORDINGS_FILE)["rules"]


def every_panel(board: dict[str, Any]) -> list[dict[str, Any]]:
    """A dashboard's panels, those in rows that are collapsed too, and no row."""
    flat = [each for panel in board["panels"] for each in (panel, *panel.get("panels", []))]
    return [panel for panel in flat if panel["type"] != "row"]
