"""`python -m helm.generator`: writes values.schema.json of the chart."""

from __future__ import annotations

from pathlib import Path

from helm.generator import schema

HELM = Path(__file__).resolve().parents[1]


def files() -> dict[str, str]:
    """Every file that is made here, by its path under `helm/`, and its text."""
    return {"values.schema.json": schema.text()}


if __name__ == "__main__":
    for name, text in files().items():
        (HELM / name).write_text(text, encoding="utf-8")
