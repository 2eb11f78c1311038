"""Draws every row of both dashboards: `python -m tests.observability.pictures`."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from tests.observability.pictures.boards import NAMES, rows
from tests.observability.pictures.draw import draw
from tests.observability.pictures.store import filled

ROOT = Path(__file__).resolve().parents[3]
BUILD, IMAGES = ROOT / "build" / "pictures", ROOT / "docs" / "images"
# Those that docs/grafana.md shows; the others stay in `build/`.
SHOWN = ("server-at-a-glance", "server-policy-and-resets", "fleet-at-a-glance", "fleet-servers")


def main() -> None:
    """Draw them all, and keep beside the page what it shows."""
    with tempfile.TemporaryDirectory() as folder, filled(Path(folder) / "prometheus") as store:
        for name in NAMES:
            for row in rows(name):
                title = re.sub(r"\W+", "-", row.title.lower())
                draw(row, store, BUILD / f"{name}-{title}.png")
    for each in SHOWN:
        shutil.copyfile(BUILD / f"{each}.png", IMAGES / f"grafana-{each}.png")


if __name__ == "__main__":
    main()
