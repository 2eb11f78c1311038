"""`python -m helm.generator`: writes values.schema.json and files/signals.json of the chart."""

from __future__ import annotations

import json
from pathlib import Path

from helm.generator import schema

HELM = Path(__file__).resolve().parents[1]


def files() -> dict[str, str]:
    return {"values.schema.json": schema.text(), "files/signals.json": json.dumps(schema.signals(), indent=2) + "\n"}


if __name__ == "__main__":
    for name, text in files().items():
        (HELM / name).write_text(text, encoding="utf-8")
