"""Writes the dashboards, the alerts, and the chart's schema and signals: `python -m helm.source`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from helm.source import schema
from helm.source.dashboards import dashboard

SOURCE = Path(__file__).resolve().parent
HELM = SOURCE.parent

# Prometheus has no variables in its rules, and every alert names its server, adds the model and gives a command in the
# same way: words in capitals, which are replaced, comments and all.
NAMES = {
    # Cluster, namespace and pod; the address that was scraped where there is no pod; and the model.
    "WHERE": (
        "{{ with $labels.cluster }}{{ . }}/{{ end }}{{ with $labels.namespace }}{{ . }}/{{ end }}"
        "{{ or $labels.pod $labels.instance }}{{ with $labels.model }} ({{ . }}){{ end }}"
    ),
    # Before a command of ours: where it runs.
    "RUN": (
        '{{ if $labels.pod }}kubectl -n {{ or $labels.namespace "NAMESPACE" }} exec {{ $labels.pod }} -c highwater -- '
        "{{ end }}"
    ),
    # The server's dashboard, for whose variables a scrape has labels.
    "BOARD": (
        "d/highwater-server?var-job={{ $labels.job }}&var-instance={{ $labels.instance }}"
        "{{ with $labels.cluster }}&var-cluster={{ . }}{{ end }}"
    ),
    "WITH_MODEL": "* on (cluster, job, instance) group_left (model) highwater_engine_info",
}


def alerts() -> str:
    text = (SOURCE / "alerts.yaml").read_text(encoding="utf-8")
    for name, meaning in NAMES.items():
        # What stands before a command ends in a blank of its own, where there is something.
        text = re.sub(rf"\b{name}\b ?" if name == "RUN" else rf"\b{name}\b", lambda _, meaning=meaning: meaning, text)
    return (
        "# Written by `python -m helm.source` from helm/source/alerts.yaml. Your own copy may be edited as it is.\n#\n"
        + text
    )


def files() -> dict[str, str]:
    boards = {f"dashboards/highwater-{name}.json": dashboard(SOURCE / f"{name}.yaml") for name in ("server", "fleet")}
    return boards | {
        "alerts/highwater.rules.yaml": alerts(),
        "values.schema.json": schema.text(),
        "files/signals.json": json.dumps(schema.signals(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HELM / name).write_text(text, encoding="utf-8")
