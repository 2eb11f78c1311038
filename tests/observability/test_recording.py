"""The recording rules: Prometheus' own judgement, their values, and that they are as few as they should be."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.helm.chart import the

from .conftest import promtool
from .rule_files import RECORDINGS, RECORDINGS_FILE, ROOT, group_of

VALUES = Path(__file__).parent / "recordings" / "two-models.yaml"


def test_prometheus_takes_the_recordings():
    promtool("check", "rules", "--lint=all", "--lint-fatal", RECORDINGS_FILE)


def test_a_models_figures_are_those_of_its_servers():
    promtool("test", "rules", VALUES)


def test_they_are_one_group_whose_rules_come_after_what_they_read():
    made: list[str] = []
    for rule in RECORDINGS:
        read = re.findall(r"\b(?:instance|namespace)\w*:highwater_\w+:\w+", rule["expr"])
        assert set(read) <= set(made), rule["record"]
        made.append(rule["record"])
    assert len(set(made)) == len(made)


def test_the_chart_brings_alerts_and_recordings(tmp_path):
    rule = the("PrometheusRule", {"prometheusRule": {"enabled": True}})
    assert {group["name"] for group in rule["spec"]["groups"]} == {"highwater", group_of(RECORDINGS_FILE)["name"]}
    spec = tmp_path / "rules.yaml"
    spec.write_text(yaml.safe_dump(rule["spec"]))
    promtool("check", "rules", "--lint=all", "--lint-fatal", spec)


def test_the_fleets_dashboard_reads_only_recordings_that_there_are():
    """A panel of one that was renamed would be empty."""
    text = (ROOT / "helm" / "dashboards" / "highwater-fleet.json").read_text()
    read = set(re.findall(r"\b(?:instance|namespace)\w*:highwater_\w+:\w+", text))
    assert read
    assert read <= {recording["record"] for recording in RECORDINGS}
