"""The dashboards: what is in the repository is what the code makes, and Grafana's rules hold."""

from __future__ import annotations

import itertools
import json
import re
from typing import get_args

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from helm.source.__main__ import HELM, files
from helm.source.dashboards import OWN, Query, UnknownMetricError, described, names_in
from highwater.diagnose.verdict import _EXIT, VerdictState
from highwater.process.errors import ATTENTION
from tests.observability.labels import unknown_labels

DASHBOARDS = ("highwater-server", "highwater-fleet")
FOLDER = HELM / "dashboards"


def dashboard(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def panels(name: str) -> list[dict]:
    """Every panel and row, those in rows that are collapsed too."""
    return [each for panel in dashboard(name)["panels"] for each in (panel, *panel.get("panels", []))]


def queries(name: str) -> list[str]:
    asked = [target["expr"] for panel in panels(name) for target in panel.get("targets", [])]
    return asked + [annotation["expr"] for annotation in dashboard(name)["annotations"]["list"]]


@pytest.mark.parametrize(("name", "most"), [("highwater-server", 40), ("highwater-fleet", 15)])
def test_nobody_reads_more_panels_than_these(name, most):
    assert len([panel for panel in panels(name) if panel["type"] != "row"]) <= most


def test_the_servers_first_line_says_whether_it_is_fine_and_the_second_what_clients_feel():
    shown = [panel for panel in dashboard("highwater-server")["panels"] if panel["type"] != "row"]
    first, second = ([panel for panel in shown if panel["gridPos"]["y"] == top] for top in (1, 5))
    assert [panel["title"] for panel in first] == ["Verdict", "Free, worst rank", "Full at", "Firing alerts"]
    assert {panel["type"] for panel in first} == {"stat"}
    assert second[0]["title"] == "Latency, 95 %"


@pytest.mark.parametrize(("name", "title"), [("highwater-server", "Verdict"), ("highwater-fleet", "Verdicts")])
def test_a_verdict_has_the_colour_of_its_exit_status(name, title):
    """Green is in order, orange wants somebody to look, red somebody to act."""
    (panel,) = [each for each in panels(name) if each["title"] == title]
    shown = {
        override["matcher"]["options"]: {each["id"]: each["value"] for each in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    expected = {state: ("green", "orange", "red")[_EXIT.get(state, ATTENTION)] for state in get_args(VerdictState)}
    assert {state: shown[state]["color"]["fixedColor"] for state in expected} == expected


def test_what_is_generated_is_in_the_repository():
    written = {path.relative_to(HELM).as_posix(): path.read_text() for path in FOLDER.iterdir()}
    assert written == {name: text for name, text in files().items() if name.startswith("dashboards/")}


def test_a_metric_that_is_not_exported_stops_the_generation():
    with pytest.raises(UnknownMetricError, match="highwater_device_memory_usd_bytes"):
        described("x", [Query("max(highwater_device_memory_usd_bytes)")])
    with pytest.raises(UnknownMetricError):
        names_in("rate(highwater_growth_bytes_bucket[5m])")


def test_a_label_that_a_family_does_not_have_is_found():
    assert unknown_labels('highwater_engine_up{rank="0"}') == {"rank"}
    assert unknown_labels("sum by (pod, ranks) (highwater_growth_bytes)") == {"ranks"}
    assert unknown_labels('sum by (pod) (highwater_device_memory_used_ratio{rank=~"0|1", job="x"})') == set()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafanas_own_types_take_it(name):
    """The SDK reads what was written, and would write the same panels again."""
    loaded = Dashboard.from_json(dashboard(name))
    assert loaded.uid == name
    assert len(loaded.panels) == len(dashboard(name)["panels"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name):
    ids = [panel["id"] for panel in panels(name)]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in panels(name)]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_is_there_and_used(name):
    text = json.dumps(dashboard(name))
    names = {variable["name"] for variable in dashboard(name)["templating"]["list"]}
    spoken = {a or b for a, b in re.findall(r"\$(?:\{(\w+)[}:]|(\w+))", text)}
    assert {word for word in spoken if not word.startswith("__")} == names


def test_what_is_exported_is_shown():
    shown = {family for name in DASHBOARDS for query in queries(name) for family in names_in(query)}
    assert set(OWN) - shown == set()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_is_chosen_by_cluster_and_namespace(name):
    for query in queries(name):
        selectors = re.findall(r"\b(?:highwater_\w+|vllm:\w+|ALERTS|up|\w+:highwater_\w+:\w+)\{([^}]*)\}", query)
        assert selectors
        assert [each for each in selectors if 'cluster=~"$cluster"' not in each or "$namespace" not in each] == []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_an_alert_leads_to_its_runbook(name):
    (alerts,) = [panel for panel in panels(name) if panel["title"] == "Alerts"]
    (link,) = alerts["fieldConfig"]["defaults"]["links"]
    assert link["url"] == "$runbooks/${__field.labels.alertname}.html"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_firing_alert_is_never_green(name):
    (alerts,) = [panel for panel in panels(name) if panel["title"] == "Alerts"]
    (mapping,) = alerts["fieldConfig"]["defaults"]["mappings"]
    colors = {option["text"]: option["color"] for option in mapping["options"].values()}
    assert colors == {"info": "blue", "warning": "orange", "critical": "red"}
    (group,) = yaml.safe_load((HELM / "alerts" / "highwater.rules.yaml").read_text())["groups"]
    assert {rule["labels"]["severity"] for rule in group["rules"]} == colors.keys()
