"""The recording rules: Prometheus' own judgement, their values, and that they are as few as they should be."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import the

from .conftest import tool
from .rule_files import ALERTS, RECORDINGS, RECORDINGS_FILE, ROOT, group_of

VALUES = Path(__file__).parent / "recordings" / "two-models.yaml"
# What a recording may leave: a rank's own labels in none.
LEFT = {"namespace", "model", "component", "level", "state", "remedy", "outcome", "code", "le"}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording["record"])
def test_a_recordings_name_says_what_is_left_and_of_what(recording):
    """Level, family, operation, as Prometheus' own advice has it; the labels are those of its aggregation."""
    level, family, operation = recording["record"].split(":")
    assert family in recording["expr"]
    assert re.fullmatch(r"(max|min|sum|avg|count|missing|room_ratio|seconds_left15m|(rate|increase)5m)", operation)
    if not level.startswith("instance"):
        (labels,) = re.findall(r"by \(([^)]*)\)", recording["expr"])
        # The cluster is in no name: where there is one Prometheus for each, none of its series has it.
        cluster, *others = labels.split(", ")
        assert (cluster, "_".join(others)) == ("cluster", level)
        assert set(others) <= LEFT


def test_the_alerts_do_not_need_them():
    assert not [alert["alert"] for alert in ALERTS if re.search(r"\w:highwater_", alert["expr"])]


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
