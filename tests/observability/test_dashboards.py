"""The dashboards: what is in the repository is what the code makes, and Grafana's rules hold."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from helm.source import metrics
from helm.source.__main__ import ALERTS, files
from helm.source.__main__ import DASHBOARDS as FOLDER
from helm.source.metrics import UnknownMetricError, names_in
from helm.source.panels import Query, described
from tests.observability.labels import unknown_labels

DASHBOARDS = ("highwater-server", "highwater-fleet")


def dashboard(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def panels(name: str) -> list[dict]:
    """Every panel and row, those in rows that are collapsed too."""
    return [each for panel in dashboard(name)["panels"] for each in (panel, *panel.get("panels", []))]


def queries(name: str) -> list[str]:
    asked = [target["expr"] for panel in panels(name) for target in panel.get("targets", [])]
    return asked + [annotation["expr"] for annotation in dashboard(name)["annotations"]["list"]]


def test_what_is_generated_is_in_the_repository():
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == files()


def test_a_metric_that_is_not_exported_stops_the_generation():
    with pytest.raises(UnknownMetricError, match="highwater_device_memory_usd_bytes"):
        described("x", [Query("max(highwater_device_memory_usd_bytes)")])
    with pytest.raises(UnknownMetricError):
        names_in("rate(highwater_growth_bytes_bucket[5m])")


def test_a_label_that_a_family_does_not_have_is_found():
    assert unknown_labels('highwater_engine_up{rank="0"}') == {"rank"}
    assert unknown_labels("sum by (pod, ranks) (highwater_growth_bytes)") == {"ranks"}
    assert unknown_labels('sum by (pod) (highwater_device_memory_used_ratio{rank=~"0|1", job="x"})') == set()


def test_names_in_text_are_not_taken_for_metrics():
    """A label's value may be anything; a histogram's series belong to its family."""
    assert names_in('x{job="highwater_x"} / highwater_poll_duration_seconds_bucket') == [
        "highwater_poll_duration_seconds"
    ]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafanas_own_types_take_it(name):
    """The SDK reads what was written, and would write the same panels again."""
    loaded = Dashboard.from_json(dashboard(name))
    assert loaded.uid == name
    assert len(loaded.panels) == len(dashboard(name)["panels"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name):
    """Unique ids, and a place on the grid of 24 columns for each."""
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
def test_every_panel_says_what_it_shows_and_in_what_unit(name):
    shown = [panel for panel in panels(name) if panel["type"] != "row"]
    assert len(shown) > 15
    for panel in shown:
        sentence, _, rest = panel["description"].partition("\n")
        assert sentence.endswith((".", ")."))
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))
        for family in {family for target in panel["targets"] for family in names_in(target["expr"])}:
            assert f"- `{family}`: {metrics.help_of(family)}" in rest
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_metric_is_exported(name):
    for query in queries(name):
        assert names_in(query)
        assert unknown_labels(query) == set(), query


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_is_there_and_used(name):
    text = json.dumps(dashboard(name))
    names = {variable["name"] for variable in dashboard(name)["templating"]["list"]}
    spoken = {a or b for a, b in re.findall(r"\$(?:\{(\w+)[}:]|(\w+))", text)}
    assert {word for word in spoken if not word.startswith("__")} == names


def test_what_is_exported_is_shown():
    shown = {family for name in DASHBOARDS for query in queries(name) for family in names_in(query)}
    assert set(metrics.OWN) - shown == set()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_variables_are_chained_from_the_cluster_down(name):
    variables = [each for each in dashboard(name)["templating"]["list"] if each["type"] == "query"]
    names = [each["name"] for each in variables]
    assert names[:5] == ["cluster", "namespace", "job", "model", "pod"]
    for place, variable in enumerate(variables[:5]):
        asked = set(re.findall(r"\$(\w+)", variable["query"]["query"]))
        assert asked == set(names[:place])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_is_chosen_by_cluster_and_namespace(name):
    for query in queries(name):
        selectors = re.findall(r"\b(?:highwater_\w+|vllm:\w+|ALERTS|up|\w+:highwater_\w+:\w+)\{([^}]*)\}", query)
        assert selectors
        assert [each for each in selectors if 'cluster=~"$cluster"' not in each or "$namespace" not in each] == []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_counter_is_drawn_raw(name):
    """One since the sidecar's start only grows, and begins anew at each restart."""
    # One that began within the interval counts from 0: `increase` does not see a series' first reading.
    born = re.compile(r"\((\w+\{[^}]*\}) unless \1 offset \$__rate_interval\)")
    for query in (born.sub("", query) for query in queries(name)):
        counters = re.findall(r"\b(?:highwater|vllm:)\w+_total\{[^}]*\}(\[?)", query)
        assert all(counters) or "offset $__interval" in query, query


@pytest.mark.parametrize("name", DASHBOARDS)
def test_rows_below_the_first_are_asked_for_only_when_opened(name):
    rows = [panel for panel in dashboard(name)["panels"] if panel["type"] == "row"]
    still_open = [row["title"] for row in rows if not row["collapsed"]]
    assert still_open == {"highwater-server": ["At a glance"], "highwater-fleet": ["At a glance", "Servers"]}[name]
    assert all(row["panels"] for row in rows if row["collapsed"])


def test_memory_and_latency_are_on_one_screen():
    first = dashboard("highwater-server")["panels"]
    places = {panel["title"]: panel["gridPos"] for panel in first if panel["type"] == "timeseries"}
    memory, latency = places["Memory of all ranks"], places["Latency, 95 %"]
    assert (memory["y"], memory["x"] + memory["w"]) == (latency["y"], latency["x"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_an_alert_leads_to_its_runbook(name):
    (alerts,) = [panel for panel in panels(name) if panel["title"] == "Alerts"]
    (link,) = alerts["fieldConfig"]["defaults"]["links"]
    assert link["url"] == "$runbooks/${__field.labels.alertname}.html"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_firing_alert_is_never_green(name):
    """It has the colour of its severity, as every severity that the rules have."""
    (alerts,) = [panel for panel in panels(name) if panel["title"] == "Alerts"]
    (mapping,) = alerts["fieldConfig"]["defaults"]["mappings"]
    colors = {option["text"]: option["color"] for option in mapping["options"].values()}
    assert colors == {"info": "blue", "warning": "orange", "critical": "red"}
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert {rule["labels"]["severity"] for rule in group["rules"]} == colors.keys()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_fixed_size_is_a_threshold(name):
    for panel in panels(name):
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        steps = defaults.get("thresholds", {}).get("steps", [])
        if defaults.get("unit") == "bytes":
            assert len(steps) < 2, panel["title"]
        if "limit" in panel["title"] or "full" in panel["title"]:
            assert "green" not in [step["color"] for step in steps], panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_first_row_is_numbers(name):
    first = [panel["type"] for panel in panels(name)[:9]]
    assert first == ["row", *["stat"] * 8]
