"""docs/fleet.md: what it says of labels and series is so, and its examples are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import get_args

import yaml
from prometheus_client.parser import text_string_to_metric_families

from gated_proxy.door import Mode as DoorMode
from helm.source.dashboards import OWN
from highwater.act.remedies import REMEDIES
from highwater.diagnose.verdict import VerdictState
from highwater.model.components import COMPONENT_NAMES
from highwater.model.engine import EngineState
from highwater.model.policy import ActionOutcome, PolicyLevel, RulePhase
from highwater.model.report import Trigger

from .conftest import promtool, yaml_blocks
from .pictures.server import STEP_SECONDS, Server
from .pictures.store import BEGAN, MINUTES
from .rule_files import ALERTS, RECORDINGS, every_panel

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "fleet.md").read_text()
GOLDEN = (ROOT / "tests" / "unit" / "http" / "golden" / "metrics.txt").read_text()


def scrapes() -> Iterator[str]:
    """What a sidecar with two ranks exports from a start on, relief and errors among it; vLLM's families left out."""
    server, at = Server(0, "vl-8b", BEGAN, dies=False), BEGAN
    while True:
        yield server.page(at).partition("# HELP vllm:")[0]
        at += STEP_SECONDS


WHOLE_SCENE = 60 * MINUTES // STEP_SECONDS


def series(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


# --- cardinality ---


def test_the_simulated_server_exports_what_a_real_one_does():
    families = {name.removesuffix("_total") for name in OWN}
    (page,) = islice(scrapes(), WHOLE_SCENE, WHOLE_SCENE + 1)
    simulated = {family.name for family in text_string_to_metric_families(page)}
    simulated = {name for name in simulated if not name.endswith("_created")}
    assert simulated == families


def test_every_label_is_on_the_page_and_bounded_there():
    """A new label is a decision: it must be said why it cannot grow."""
    labels = set(re.findall(r'(?:[{]|",)(\w+)="', GOLDEN))
    (table,) = re.findall(r"^\| label \| its values \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert labels == told
    sizes = [COMPONENT_NAMES, get_args(EngineState), get_args(RulePhase), REMEDIES, get_args(Trigger)]
    sizes += [get_args(ActionOutcome), get_args(PolicyLevel), get_args(VerdictState), get_args(DoorMode)]
    assert [len(each) for each in sizes] == [6, 9, 6, 5, 3, 5, 5, 13, 3]
    assert "| `state`, `mode`, `level` | of the verdict 13, the engine 9, a rule 6; 2, of the door 3; 5 |" in table
    assert "| `remedy`, `trigger`, `outcome` | 5, 3, 5 |" in table


def test_no_request_of_a_client_makes_a_series():
    assert len({len(series(page)) for page in islice(scrapes(), WHOLE_SCENE, WHOLE_SCENE + 40)}) == 1


# --- examples ---


def test_what_is_dropped_is_read_by_no_rule(tmp_path):
    (scrape,) = yaml_blocks("fleet", "scrape_configs")
    dropped = [rule["regex"] for rule in scrape["scrape_configs"][0]["metric_relabel_configs"]]
    board = json.loads((ROOT / "helm" / "dashboards" / "highwater-fleet.json").read_text())
    queries = [target["expr"] for panel in every_panel(board) for target in panel.get("targets", [])]
    queries += [rule["expr"] for rule in [*ALERTS, *RECORDINGS]]
    read = {name for query in queries for name in re.findall(r"\bhighwater_\w+", query)}
    assert [(name, regex) for name in read for regex in dropped if re.fullmatch(regex, name)] == []
    (page,) = islice(scrapes(), WHOLE_SCENE, WHOLE_SCENE + 1)
    known = [line.split("{")[0].split(" ")[0] for line in series(page)]
    own = [regex for regex in dropped if regex.startswith("highwater")]
    assert all(any(re.fullmatch(regex, name) for name in known) for regex in own)
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(scrape))
    promtool("check", "config", config)


def test_prometheus_takes_the_documented_remote_write(tmp_path):
    (block,) = yaml_blocks("fleet", "remote_write")
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(block))
    promtool("check", "config", config)
    (kept,) = [rule["regex"] for rule in block["remote_write"][0]["write_relabel_configs"]]
    recorded = [each["record"] for each in RECORDINGS]
    assert [name for name in recorded if re.fullmatch(kept, name)] == [
        name for name in recorded if name.startswith("namespace_model")
    ]


def test_the_adapter_serves_what_the_charts_autoscaler_asks_for():
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())
    asked = [metric["name"] for metric in values["autoscaling"]["hpa"]["podMetrics"]]
    (adapter,) = yaml_blocks("fleet", "rules")
    (served,) = [rule["seriesQuery"] for rule in adapter["rules"]["custom"]]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', served)
    assert asked
    assert all(name in OWN and re.fullmatch(pattern, name) for name in asked)
