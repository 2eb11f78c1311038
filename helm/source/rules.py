"""The rule files: alerts and recordings as Prometheus loads them, and as a PrometheusRule's `spec` can hold them."""

from __future__ import annotations

from typing import Any

import yaml

from helm.source.alerts import ALERTS, Alert, duration
from helm.source.recording import GROUP, INTERVAL_SECONDS, RECORDINGS

RUNBOOK_BASE = "docs/runbooks/"
"""A path in the repository: `runbook_url` is a link only where this is the URL of a published copy."""

_HEAD = """# Highwater's alerts. Made by `python -m helm.source` (helm/source/alerts.py): change them there.
# Plain Prometheus rules: load with `rule_files:`, or as the `spec` of a PrometheusRule. docs/grafana.md tells how.
"""
_RECORDING_HEAD = """# Highwater's recording rules. Made by `python -m helm.source` from helm/source/recording.py.
# Plain Prometheus rules: load with `rule_files:`, or as the `spec` of a PrometheusRule. docs/fleet.md tells what they
# are for; the alerts do not need them.
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


def recording_groups(interval_seconds: float = INTERVAL_SECONDS) -> dict[str, Any]:
    """The one group of recordings; another interval is for tests and measurements."""
    rules = [{"record": recording.record, "expr": recording.expr} for recording in RECORDINGS]
    return {"groups": [{"name": GROUP, "interval": duration(interval_seconds), "rules": rules}]}


def recording_file() -> str:
    """The recordings' file's text."""
    return _RECORDING_HEAD + yaml.dump(recording_groups(), Dumper=_Dumper, sort_keys=False, width=110)
