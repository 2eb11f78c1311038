"""The rule file: the alerts as Prometheus loads them, and as a PrometheusRule's `spec` can hold them."""

from __future__ import annotations

from typing import Any

import yaml

from helm.source.alerts import ALERTS, Alert, duration

RUNBOOK_BASE = "docs/runbooks/"
"""A path in the repository: `runbook_url` is a link only where this is the URL of a published copy."""

_HEAD = """# Highwater's alerts. Made by `python -m helm.source` (helm/source/alerts.py): change them there.
# Plain Prometheus rules: load with `rule_files:`, or as the `spec` of a PrometheusRule. docs/grafana.md tells how.
"""


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines as blocks, as people write them."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def rule_groups(runbook_base: str = RUNBOOK_BASE, pace: float = 1.0) -> dict[str, Any]:
    """The groups.

    Args:
        runbook_base: What `runbook_url` begins with; a URL wants its slash at the end.
        pace: How many times faster than in earnest: 60 makes a minute of every hour. For tests.
    """
    group: dict[str, Any] = {"name": "highwater", "rules": [_rule(alert, runbook_base, pace) for alert in ALERTS]}
    if pace != 1.0:
        group["interval"] = duration(60 / pace)
    return {"groups": [group]}


def _rule(alert: Alert, runbook_base: str, pace: float) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression(pace)}
    if alert.holds:
        rule["for"] = duration(alert.holds / pace)
    return rule | {
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbook_base}{alert.name}.md",
        },
    }


def rule_file(runbook_base: str = RUNBOOK_BASE) -> str:
    """The rule file's text."""
    return _HEAD + yaml.dump(rule_groups(runbook_base), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
