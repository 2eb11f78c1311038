"""The alerts: Prometheus' own judgement, names that exist, a test for each with promtool, and a runbook for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from helm.source.__main__ import NAMES as WORDS
from helm.source.__main__ import alerts as generated
from helm.source.dashboards import names_in
from highwater.terminal.cli import main
from tests.observability.labels import unknown_labels

from .conftest import promtool, yaml_blocks
from .rule_files import ALERTS, ALERTS_FILE, RECORDINGS, ROOT

TESTS = Path(__file__).parent / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"
NAMES = sorted({alert["alert"] for alert in ALERTS})
MAX_NAMES = 18
# Each rule's name: the alert, and its reason where several rules are one alert.
RULES = ["-".join(filter(None, (alert["alert"], alert["labels"].get("reason")))) for alert in ALERTS]
# It is about all servers.
NO_SERVER = "HighwaterSidecarDown-none_left"


def test_prometheus_takes_the_rules():
    promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS_FILE)


def test_every_alert_fires_when_it_should_and_not_in_the_near_miss(tmp_path):
    """Each beside the rules of its own name: promtool evaluates all that it is given at every step of every case."""
    for path in TESTS.glob("*.yaml"):
        name = path.stem.partition("-")[0]
        own = {"name": name, "rules": [alert for alert in ALERTS if alert["alert"] == name]}
        (tmp_path / f"{name}.rules").write_text(yaml.safe_dump({"groups": [own]}))
        case = yaml.safe_load(path.read_text())
        assert case["rule_files"] == ["../../../helm/alerts/highwater.rules.yaml"]
        (tmp_path / path.name).write_text(yaml.safe_dump(case | {"rule_files": [f"{name}.rules"]}))
    promtool("test", "rules", *sorted(tmp_path.glob("*.yaml")))


def test_every_alert_has_a_test_of_both_kinds():
    assert sorted(path.stem for path in TESTS.glob("*.yaml")) == sorted(RULES)
    for rule in RULES:
        name, _, reason = rule.partition("-")
        cases = yaml.safe_load((TESTS / f"{rule}.yaml").read_text())["tests"]
        moments = [moment for case in cases for moment in case.get("alert_rule_test", [])]
        assert {moment["alertname"] for moment in moments} == {name}
        told = [
            {alert["exp_labels"].get("reason", "") for alert in moment["exp_alerts"] if alert["exp_annotations"]}
            for moment in moments
        ]
        assert any(reason in each for each in told), rule
        assert any(reason not in each for each in told), rule
        assert len(cases) > 1, rule


def test_one_cause_is_one_alert():
    """Several rules of one name each say by their reason which they are."""
    assert len(NAMES) <= MAX_NAMES
    assert len(set(RULES)) == len(RULES)
    assert [name for name in NAMES if name in RULES and any(rule.startswith(f"{name}-") for rule in RULES)] == []


def test_every_alert_has_a_runbook_and_no_runbook_is_left_over():
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_runbook_says_what_to_do_for_each_reason(name):
    text = (RUNBOOKS / f"{name}.md").read_text()
    reasons = [rule.partition("-")[2] for rule in RULES if rule.startswith(f"{name}-")]
    assert [reason for reason in reasons if f"`{reason}`" not in text and f"### {reason}\n" not in text] == []


def test_a_verdict_leads_to_a_runbook_that_exists():
    said = (ROOT / "app" / "highwater" / "diagnose" / "verdict.toml").read_text()
    assert set(re.findall(r'^runbook = "(\w+)"', said, re.MULTILINE)) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_runbooks_commands_exist(name):
    text = (RUNBOOKS / f"{name}.md").read_text()
    known = (ROOT / "docs" / "http.md").read_text()
    paths = set(re.findall(r"\$SIDECAR(/[\w/-]*)", text))
    assert [path for path in sorted(paths) if f"`{path}" not in known and f" {path}" not in known] == []
    assert set(re.findall(r"(?:^|-- |`)highwater (\w+)", text, re.MULTILINE)) <= set(main.commands)
    exported = (ROOT / "tests" / "unit" / "http" / "golden" / "metrics.txt").read_text()
    assert [
        name for name in re.findall(r"\bhighwater_(?!worker\b)\w+", text) if f"# TYPE {name} " not in exported
    ] == []


def test_the_alerts_in_the_repository_are_those_that_are_generated():
    assert ALERTS_FILE.read_text() == generated()
    assert not re.search(rf"\b({'|'.join(WORDS)})\b", generated())


@pytest.mark.parametrize("alert", ALERTS, ids=RULES)
def test_an_alert_says_how_bad_it_is_what_to_do_first_and_where_to_read_on(alert):
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "first_step", "runbook_url", "dashboard_url"}
    assert notes["runbook_url"] == f"docs/runbooks/{alert['alert']}.md"
    assert notes["description"].endswith(".")
    assert not notes["summary"].endswith(".")
    commands = re.findall(r"highwater (\w+)(?: |$)", notes["first_step"])
    assert set(commands) <= set(main.commands)
    assert commands or notes["first_step"].endswith((".", "{{ end }}"))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != NO_SERVER])
def test_an_alert_names_its_server_and_model(rule):
    alert = ALERTS[RULES.index(rule)]
    assert alert["annotations"]["summary"].startswith(f"{WORDS['WHERE']}: ")
    assert alert["annotations"]["dashboard_url"] == WORDS["BOARD"]
    assert "group_left (model)" in alert["expr"]


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDINGS], ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_holds_over_several_clusters(rule):
    groups = re.findall(r"\b(?:on|by) \(([^)]*)\)", rule["expr"])
    assert [group for group in groups if "cluster" not in group.split(", ")] == []


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDINGS], ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_reads_only_metrics_and_labels_that_exist(rule):
    """A family that was renamed, or a label that it does not have, would silently match nothing."""
    assert names_in(rule["expr"])
    assert unknown_labels(rule["expr"]) == set()


def test_prometheus_takes_the_documented_scrapes(tmp_path):
    scrapes = yaml_blocks("grafana", "scrape_configs")
    assert len(scrapes) == 2
    for scrape in scrapes:
        # Debian's build knows no Kubernetes; the relabelling is checked all the same.
        scrape["scrape_configs"][0].pop("kubernetes_sd_configs", None)
        config = tmp_path / "prometheus.yml"
        config.write_text(yaml.safe_dump(scrape | {"rule_files": [str(ALERTS_FILE)]}))
        promtool("check", "config", config)
