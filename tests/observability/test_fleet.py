"""docs/fleet.md: what it says of labels and costs is so, its examples are valid, and its simulation runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.attribution import COMPONENTS
from app.governor import ActionOutcome
from app.readings import EngineState, Moment, PolicyLevel, RulePhase, Trigger
from app.remedies import REMEDIES
from bench import fleet
from bench.dataplane.report import Report
from bench.page import with_report
from bench.simulated_fleet import ENGINE_SERIES, PROCESS_SERIES, Sidecar
from helm.source.alerts import ALERTS
from helm.source.metrics import OWN, names_in
from helm.source.recording import RECORDINGS

from .conftest import tool
from .test_recording import promtool

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "fleet.md").read_text()
GOLDEN = (ROOT / "tests" / "unit" / "golden" / "metrics.txt").read_text()


def yaml_blocks(key: str) -> list[dict[str, Any]]:
    found = re.findall(r"^ *```yaml\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)
    return [block for block in map(yaml.safe_load, found) if key in block]


def series(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


# --- cardinality ---


def test_the_page_counts_a_pods_series():
    """A scrape of one with eight ranks and one with none: what a rank adds, and what there is besides."""
    whole, bare = (series(Sidecar(0, ranks).page(engine=False)[0].decode()) for ranks in (8, 0))
    of_rank = sum('rank="0"' in line for line in whole)
    of_devices = sum(line.startswith("highwater_devices_") for line in whole)
    assert len(whole) == len(bare) + of_devices + 8 * of_rank
    told = f"| {len(bare)}, {of_devices} for all devices and {of_rank} for each rank: {len(whole)} with eight |"
    assert told in PAGE
    assert f"when each counter began | {sum('_created' in line for line in whole)} |" in PAGE
    engine = len(series(Sidecar(0, 8).page(engine=True)[0].decode())) - len(whole)
    assert engine == ENGINE_SERIES + PROCESS_SERIES
    assert f"| {ENGINE_SERIES} of vLLM's and {PROCESS_SERIES} of its process" in PAGE


def test_the_simulated_sidecars_export_what_real_ones_do():
    """Every family but those of what did not happen to them."""
    families = {name.removesuffix("_total") for name in OWN}
    simulated = {family.name for family in text_string_to_metric_families(Sidecar(0, 8).page(engine=False)[0].decode())}
    simulated = {name for name in simulated if not name.endswith("_created")}
    assert simulated == families


def test_every_label_is_on_the_page_and_bounded_there():
    """A new label is a decision: it must be said why it cannot grow."""
    labels = set(re.findall(r'(?:[{]|",)(\w+)="', GOLDEN))
    (table,) = re.findall(r"^\| label \| its values \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert labels == told
    sizes = [COMPONENTS, get_args(EngineState), get_args(RulePhase), REMEDIES, get_args(Trigger)]
    sizes += [get_args(ActionOutcome), get_args(Moment), get_args(PolicyLevel)]
    assert [len(each) for each in sizes] == [6, 9, 6, 5, 3, 5, 2, 5]
    assert "| `state`, `mode`, `level` | of the engine 9, of a rule 6; 2; 5 |" in table
    assert "| `remedy`, `trigger`, `outcome`, `moment` | 5, 3, 5, 2 |" in table


def test_no_request_of_a_client_makes_a_series():
    """Hundreds of them, and images that come and go: the page is as long as after the first."""
    sidecar = Sidecar(0, 2)
    lengths = {len(series(sidecar.page(engine=False)[0].decode())) for _ in range(40)}
    assert len(lengths) == 1


# --- examples ---


def test_what_is_dropped_is_read_by_no_rule(tmp_path):
    """Nor by the fleet's dashboard; and Prometheus takes the configuration."""
    (scrape,) = yaml_blocks("scrape_configs")
    dropped = [rule["regex"] for rule in scrape["scrape_configs"][0]["metric_relabel_configs"]]
    board = json.loads((ROOT / "helm" / "dashboards" / "highwater-fleet.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [alert.expr for alert in ALERTS] + [recording.expr for recording in RECORDINGS]
    read = {name for query in queries for name in re.findall(r"\bhighwater_\w+", query)}
    assert [(name, regex) for name in read for regex in dropped if re.fullmatch(regex, name)] == []
    known = [line.split("{")[0].split(" ")[0] for line in series(Sidecar(0, 1).page(engine=False)[0].decode())]
    own = [regex for regex in dropped if regex.startswith("highwater")]
    assert all(any(re.fullmatch(regex, name) for name in known) for regex in own)
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(scrape))
    promtool("check", "config", config)


def test_prometheus_takes_the_documented_remote_write(tmp_path):
    """`promtool check config`; and what it keeps are recordings."""
    (block,) = yaml_blocks("remote_write")
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(block))
    promtool("check", "config", config)
    (kept,) = [rule["regex"] for rule in block["remote_write"][0]["write_relabel_configs"]]
    assert [each.record for each in RECORDINGS if re.fullmatch(kept, each.record)] == [
        each.record for each in RECORDINGS if each.record.startswith("namespace_model")
    ]


def test_the_adapter_serves_what_the_charts_autoscaler_asks_for():
    """And it reads what is exported; that the chart's autoscalers are valid is tested in tests/helm."""
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())
    asked = [metric["name"] for metric in values["autoscaling"]["hpa"]["podMetrics"]]
    (adapter,) = yaml_blocks("rules")
    (served,) = [rule["seriesQuery"] for rule in adapter["rules"]["custom"]]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', served)
    assert asked
    assert all(name in OWN and re.fullmatch(pattern, name) for name in asked)


def test_the_page_lists_every_recording_and_names_only_what_is_there():
    """Whatever begins with our prefix is exported or recorded."""
    section = PAGE.partition("## Recording rules")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\S+)` +\| (\S.*?) +\|$", section, re.MULTILINE)
    assert listed == [(recording.record, recording.meaning) for recording in RECORDINGS]
    said = set(re.findall(r"\b(?:instance|namespace_model)\w*:highwater_\w+:\w+", PAGE))
    assert said == {recording.record for recording in RECORDINGS}
    assert all(names_in(name) for name in re.findall(r"`(highwater_\w+)[`{]", PAGE))


# --- the simulation ---


def test_the_page_gets_the_report_in_its_place():
    """Between the marks, and nowhere else."""
    report = Report(title="t", columns=("what", "so many"), rows=[("pods", "2")], facts=["Few."], methods=["Counted."])
    page = with_report(
        "# A\n\n<!-- figures -->\nold\n<!-- end -->\n\nRest.\n",
        *(report,),
        command="make it",
        machine="one",
        day="2026-01-02",
        notes=["Busy."],
    )
    assert page.startswith("# A\n\n<!-- figures -->\n\nWritten by `make it` on 2026-01-02")
    assert page.endswith("\nFew.\n\n- Counted.\n- Busy.\n\n<!-- end -->\n\nRest.\n")
    assert "old" not in page


@pytest.mark.timeout(240)
def test_a_real_prometheus_scrapes_a_fleet_and_evaluates_all_rules(tmp_path):
    """The benchmark in small: every target answers, no rule fails, and the series are as many as the page says."""
    tool("prometheus")
    seen = fleet.watch(tmp_path, fleet.SHORT)
    assert (seen.up, seen.failures) == (fleet.SHORT.servers, 0)
    assert seen.samples == seen.ours + ENGINE_SERIES + PROCESS_SERIES
    assert f"and {seen.of_rank:.0f} for each rank: {seen.ours:.0f} with eight |" in PAGE
    assert 11 <= seen.recorded[0] <= 12
    assert 46 <= seen.recorded[1] <= 61
    assert all(seen.evaluations.values())
    assert seen.dashboard["Memory by model and component A"][1] == 18  # three models, six components
    assert seen.dashboard["Used share, worst rank of each server A"][1] == fleet.SHORT.servers
    report = fleet.report(seen, fleet.SHORT)
    assert report.columns[1] == "10 servers, measured"
    assert dict(row[:2] for row in report.rows)["series of each rank"] == f"{seen.of_rank:.0f}"
