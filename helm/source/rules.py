"""The alerts as Prometheus loads them: `alerts.yaml` with the words in capitals replaced, comments and all.

Prometheus has no variables in its rules, and every alert names its server, adds the model and gives a command in the
same way.
"""

from __future__ import annotations

import re
from pathlib import Path

ALERTS = Path(__file__).resolve().parent / "alerts.yaml"
MADE_OF = (
    "# Written by `python -m helm.source` from helm/source/alerts.yaml. Your own copy may be edited as it is.\n#\n"
)

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
    text = ALERTS.read_text(encoding="utf-8")
    for name, meaning in NAMES.items():
        # What stands before a command ends in a blank of its own, where there is something.
        text = re.sub(rf"\b{name}\b ?" if name == "RUN" else rf"\b{name}\b", lambda _, meaning=meaning: meaning, text)
    return MADE_OF + text
