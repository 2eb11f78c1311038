"""The alerts: Prometheus' own judgement, names that exist, a test for each with promtool, and a runbook for each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from helm.source.metrics import names_in
from helm.source.rules import NAMES as WORDS
from helm.source.rules import alerts as generated
from highwater.terminal.cli import main
from tests.observability.labels import unknown_labels

from .conftest import tool
from .rule_files import ALERTS, ALERTS_FILE, RECORDINGS, ROOT

TESTS = Path(__file__).parent / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"
NAMES = [alert["alert"] for alert in ALERTS]
# They are about all servers.
NO_SERVER = {"HighwaterSidecarsGone"}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules():
    promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS_FILE)


def test_every_alert_fires_when_it_should_and_not_in_the_near_miss():
    promtool("test", "rules", *sorted(TESTS.glob("*.yaml")))


def test_every_alert_has_a_test_of_both_kinds():
    assert sorted(path.stem for path in TESTS.glob("*.yaml")) == sorted(NAMES)
    for name in NAMES:
        cases = yaml.safe_load((TESTS / f"{name}.yaml").read_text())["tests"]
        moments = [moment for case in cases for moment in case.get("alert_rule_test", [])]
        assert {moment["alertname"] for moment in moments} == {name}
        assert any(alert["exp_annotations"] for moment in moments for alert in moment["exp_alerts"]), name
        assert any(not moment["exp_alerts"] for moment in moments), name
        assert len(cases) > 1, name


def test_every_alert_has_a_runbook_and_no_runbook_is_left_over():
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md")) == sorted(NAMES)


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


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_an_alert_says_how_bad_it_is_what_to_do_first_and_where_to_read_on(alert):
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "first_step", "runbook_url"}
    assert notes["runbook_url"] == f"docs/runbooks/{alert['alert']}.md"
    assert notes["description"].endswith(".")
    assert not notes["summary"].endswith(".")
    commands = re.findall(r"highwater (\w+)(?: |$)", notes["first_step"])
    assert set(commands) <= set(main.commands)
    assert commands or notes["first_step"].endswith((".", "{{ end }}"))


@pytest.mark.parametrize(
    "alert", [each for each in ALERTS if each["alert"] not in NO_SERVER], ids=lambda each: each["alert"]
)
def test_an_alert_names_its_server_and_model(alert):
    assert alert["annotations"]["summary"].startswith(f"{WORDS['WHERE']}: ")
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


def yaml_blocks(key: str) -> list[dict]:
    text = (ROOT / "docs" / "grafana.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    return [block for block in blocks if key in block]


def test_prometheus_takes_the_documented_scrapes(tmp_path):
    scrapes = yaml_blocks("scrape_configs")
    assert len(scrapes) == 2
    for scrape in scrapes:
        # Debian's build knows no Kubernetes; the relabelling is checked all the same.
        scrape["scrape_configs"][0].pop("kubernetes_sd_configs", None)
        config = tmp_path / "prometheus.yml"
        config.write_text(yaml.safe_dump(scrape | {"rule_files": [str(ALERTS_FILE)]}))
        promtool("check", "config", config)
