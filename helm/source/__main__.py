"""Writes the dashboards: `python -m helm.source`."""

from __future__ import annotations

from pathlib import Path

from helm.source.board import dashboard

SOURCE = Path(__file__).resolve().parent
DASHBOARDS = SOURCE.parent / "dashboards"


def files() -> dict[str, str]:
    """The name and text of every file that is generated."""
    return {f"highwater-{name}.json": dashboard(SOURCE / f"{name}.yaml") for name in ("server", "fleet")}


def main() -> None:
    """Write them."""
    for name, text in files().items():
        (DASHBOARDS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
