"""The dashboards as somebody sees them who chose one server: rows, panels, and queries with the variables filled in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.observability.pictures.store import STEP_SECONDS

DASHBOARDS = Path(__file__).resolve().parents[3] / "helm" / "dashboards"
NAMES = ("server", "fleet")
# The server whose engine dies; all else is at All. Grafana's rate interval is four scrapes.
VARIABLES = {
    "instance": "10.0.0.1:8002",
    "__rate_interval": f"{4 * STEP_SECONDS}s",
    "__interval": f"{STEP_SECONDS}s",
    "rank": "0|1",
}


@dataclass(frozen=True)
class Row:
    """One row of a dashboard."""

    title: str
    panels: tuple[dict[str, Any], ...]


def rows(name: str) -> list[Row]:
    board = json.loads((DASHBOARDS / f"highwater-{name}.json").read_text(encoding="utf-8"))
    found: list[tuple[str, list[dict[str, Any]]]] = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            found.append((panel["title"], list(panel["panels"])))
        else:
            found[-1][1].append(panel)
    return [Row(title, tuple(panels)) for title, panels in found]


def filled_in(text: str) -> str:
    """A query or a title as Grafana would ask or show it; what is not named is at All."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES.get(found[1], ".*"), text)
