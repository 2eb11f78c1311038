"""docs/oncall.md and docs/glossary.md name what there is: every alert, commands that exist, words of the code."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from highwater.cli import main

ROOT = Path(__file__).resolve().parents[2]
ONCALL = (ROOT / "docs" / "oncall.md").read_text(encoding="utf-8")
TERMS = re.findall(r"^\| ([\w, ]+) \| (.+) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
MAX_COMMANDS = 5
MAX_LINES = 60


def alerts() -> set[tuple[str, str]]:
    rules = yaml.safe_load((ROOT / "helm" / "alerts" / "highwater.rules.yaml").read_text())
    return {(rule["alert"], rule["labels"]["severity"]) for group in rules["groups"] for rule in group["rules"]}


def test_the_list_has_every_alert_with_its_severity_and_runbook():
    """Each once, the critical ones first."""
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) +\| (\w+) +\| [\w ]+\|$", page, re.MULTILINE)
    assert all(name == runbook for name, runbook, _ in listed)
    assert len(listed) == len(alerts())
    assert {(name, severity) for name, _, severity in listed} == alerts()
    severities = [severity for _, _, severity in listed]
    assert severities == sorted(severities, key=["critical", "warning", "info"].index)


def test_the_page_is_one_screen_of_five_symptoms():
    """Each leads to runbooks; every critical alert's is among them."""
    assert len(ONCALL.splitlines()) <= MAX_LINES
    (table,) = re.findall(r"^\| what you see \|.*\n\|---.*\n((?:\|.*\n)+)", ONCALL, re.MULTILINE)
    symptoms = [set(re.findall(r"runbooks/(\w+)\.md", row)) for row in table.splitlines()]
    assert len(symptoms) == MAX_COMMANDS
    assert all(symptoms)
    linked = set().union(*symptoms)
    assert {name for name, severity in alerts() if severity == "critical"} <= linked <= {name for name, _ in alerts()}


def test_the_five_commands_exist():
    """Those of the table, and no more."""
    listed = re.findall(r"^\| `highwater (\w+)` \|", ONCALL, re.MULTILINE)
    assert len(listed) == MAX_COMMANDS
    assert set(listed) <= set(main.commands)


def test_the_glossary_is_sorted_and_each_word_is_defined_once():
    """Twenty to thirty of them, each with a definition that ends, and with a place."""
    words = [word for word, _, _ in TERMS]
    assert words == sorted(set(words))
    assert 20 <= len(words) <= 30
    assert [word for word, meaning, place in TERMS if not meaning.endswith(".") or not place] == []


def test_the_glossary_names_keys_and_metrics_that_exist():
    """Each name in its last column is a word of the code, of its exposition or of the engine's command line."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "app").rglob("*.py")))
    known = code + (ROOT / "tests" / "unit" / "api" / "golden" / "metrics.txt").read_text()
    names = {name for _, _, place in TERMS for quoted in re.findall(r"`([^`]+)`", place) for name in _names(quoted)}
    assert len(names) > len(TERMS)
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", known)] == []


def _names(quoted: str) -> list[str]:
    return re.findall(r"[a-z_]{4,}", quoted)
