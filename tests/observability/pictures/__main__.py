"""Draws every row of both dashboards: `python -m tests.observability.pictures`."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from tests.observability.pictures.boards import NAMES, Row, rows
from tests.observability.pictures.draw import draw
from tests.observability.pictures.store import filled

ROOT = Path(__file__).resolve().parents[3]
BUILD, IMAGES = ROOT / "build" / "pictures", ROOT / "docs" / "images"
# Those that docs/grafana.md shows; the others stay in `build/`.
SHOWN = ("server-at-a-glance", "fleet-at-a-glance")


def all_rows() -> dict[str, Row]:
    named = ((name, row) for name in NAMES for row in rows(name))
    return {re.sub(r"\W+", "-", f"{name} {row.title.lower()}"): row for name, row in named}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, filled(Path(folder) / "prometheus") as store:
        for name, row in all_rows().items():
            draw(row, store, BUILD / f"{name}.png")
    for each in SHOWN:
        shutil.copyfile(BUILD / f"{each}.png", IMAGES / f"grafana-{each}.png")


if __name__ == "__main__":
    main()
