"""Writes the dashboards: `python -m helm.source`."""

from __future__ import annotations

from pathlib import Path

from helm.source.fleet_dashboard import fleet_dashboard
from helm.source.server_dashboard import server_dashboard

DASHBOARDS = Path(__file__).resolve().parents[1] / "dashboards"


def files() -> dict[str, str]:
    """The name and text of every file that is generated."""
    return {"highwater-server.json": server_dashboard(), "highwater-fleet.json": fleet_dashboard()}


def main() -> None:
    """Write them."""
    for name, text in files().items():
        (DASHBOARDS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
