"""Writes the dashboards and the alerts: `python -m helm.source`."""

from __future__ import annotations

from pathlib import Path

from helm.source.board import dashboard
from helm.source.rules import alerts

SOURCE = Path(__file__).resolve().parent
DASHBOARDS = SOURCE.parent / "dashboards"
ALERTS = SOURCE.parent / "alerts" / "highwater.rules.yaml"


def files() -> dict[str, str]:
    return {f"highwater-{name}.json": dashboard(SOURCE / f"{name}.yaml") for name in ("server", "fleet")}


def main() -> None:
    for name, text in files().items():
        (DASHBOARDS / name).write_text(text, encoding="utf-8")
    ALERTS.write_text(alerts(), encoding="utf-8")


if __name__ == "__main__":
    main()
