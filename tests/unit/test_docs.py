"""The documentation tells what the code has: tables are compared, links and paths are looked up."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml

from highwater.act.rules import PolicyChange, PolicySettings
from highwater.model.policy import PolicyStatus, RankPressure, RemedyState, RuleStatus
from highwater.process.errors import Part
from highwater.server.main import create_app
from highwater.server.settings import keys, load, variable
from highwater.terminal.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def load_tables():
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load_tables()


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_tables_are_what_the_code_says(name: str):
    assert (DOCS / name).read_text() == tables.rendered(name)


@pytest.mark.parametrize("path", sorted(tables.WRITTEN), ids=lambda path: path.name)
def test_the_dashboard_has_the_same_facts(path: Path):
    assert path.read_text() == tables.WRITTEN[path]()


def test_every_path_of_ours_is_documented():
    text = (DOCS / "http.md").read_text()
    own = create_app(load(environ={})).sidecar_paths
    assert [path for path in sorted(own) if f"`{path}`" not in text and f"{path}`" not in text] == []


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "worker_ext/README.md",
        *(str(p.relative_to(ROOT)) for p in sorted(DOCS.rglob("*.md"))),
    ],
)
def test_links_lead_somewhere(document: str):
    path = ROOT / document
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_policys_example_is_valid():
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "policy.md").read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block["policy"] for block in map(yaml.safe_load, blocks) if "policy" in block]
    assert PolicySettings.model_validate(found).rules


def test_the_policys_change_by_hand_is_valid():
    (body,) = re.findall(r"-d '(\{.*?\})'", (DOCS / "policy.md").read_text(), re.DOTALL)
    assert PolicyChange.model_validate_json(body).rules


def test_the_shown_status_has_the_fields_that_there_are():
    (block,) = re.findall(r"^```json\n(.*?)^```", (DOCS / "policy.md").read_text(), re.MULTILINE | re.DOTALL)
    status = json.loads(block)
    (rule,) = status["rules"]
    for shown, kind in (
        (status, PolicyStatus),
        (rule, RuleStatus),
        (rule["ranks"][0], RankPressure),
        (rule["remedies"][0], RemedyState),
    ):
        assert set(shown) <= {field.name for field in fields(kind)}


# --- snippets: what people copy exists ---

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
# Variables that are no settings: of commands, of the tests' environments, of docker/compose.yaml.
OTHER_VARIABLES = {"HIGHWATER_URL", "HIGHWATER_CONFIG", "HIGHWATER_CACHE_DIR", "HIGHWATER_LISTEN"}


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_that_are_shown_exist(page: Path):
    commands = {"measure": main.commands.get("record"), **main.commands}
    for line in code_of(page).splitlines():
        for command, rest in re.findall(r"(?:^ *|&& |\$\(|-- )highwater (?!-)(\w+)([^|#)]*)", line):
            assert command in commands, line
            flags = set(re.findall(r" (--[a-z][\w.-]*)", rest.partition(" -- ")[0]))
            shown = commands[command]
            if isinstance(shown, click.Group):
                word = next(iter(rest.split()), "")
                if word and not word.startswith("-"):
                    assert word in shown.commands, line
                    shown = shown.commands[word]
                else:
                    assert shown.invoke_without_command, line
            assert flags <= {flag for option in shown.params for flag in option.opts}, line


@pytest.mark.parametrize("page", [*PAGES, *sorted(DOCS.rglob("*.yaml"))], ids=lambda page: page.name)
def test_the_variables_that_are_shown_exist(page: Path):
    settings = {variable(key) for key, _ in keys()}
    shown = set(re.findall(r"\bHIGHWATER_[A-Z_]+[A-Z]\b", page.read_text(encoding="utf-8")))
    used = {name for name in shown if not name.startswith("HIGHWATER_COMPAT_")}
    assert used <= settings | OTHER_VARIABLES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_metrics_that_are_shown_exist(page: Path):
    exported = set(re.findall(r"^# TYPE (\S+)", tables.GOLDEN_METRICS.read_text(encoding="utf-8"), re.MULTILINE))
    shown = re.findall(r"(?<![\w.])`?(highwater_[a-z_]+[a-z])(?=[`{\s)])", page.read_text(encoding="utf-8"))
    ends = ("_bucket", "_created", "_count", "_sum")
    plain = {next((name.removesuffix(end) for end in ends if name.endswith(end)), name) for name in shown}
    assert plain - {"highwater_rpc", "highwater_worker"} <= exported


def test_the_runbook_of_internal_errors_names_every_part():
    page = (DOCS / "runbooks" / "HighwaterInternalErrors.md").read_text(encoding="utf-8")
    assert [part for part in get_args(Part) if f"`{part}`" not in page] == []


def alerts() -> list[tuple[str, str, str]]:
    """Each rule's alert, severity and reason."""
    (group,) = yaml.safe_load((ROOT / "helm" / "alerts" / "highwater.rules.yaml").read_text())["groups"]
    labels = [(rule["alert"], rule["labels"]) for rule in group["rules"]]
    return [(name, of["severity"], of.get("reason", "")) for name, of in labels]


def test_the_list_has_every_rule_with_its_severity_and_runbook():
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) +\|(.*)\|(.*)\|(.*)\|$", page, re.MULTILINE)
    assert all(name == runbook for name, runbook, *_ in listed)
    told = [
        (name, severity, reason)
        for name, _, *cells in listed
        for severity, cell in zip(("critical", "warning", "info"), cells, strict=True)
        for reason in re.findall(r"(\w*) ?(?:\d+\w|at once)", cell)
    ]
    assert sorted(told) == sorted(alerts())
