"""The scene that the pictures of the dashboards are drawn from: no panel of it is empty without a reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.testing.compare import compare_images

from tests.observability.pictures.__main__ import IMAGES, SHOWN, all_rows
from tests.observability.pictures.boards import NAMES, filled_in, rows
from tests.observability.pictures.draw import draw, shown
from tests.observability.pictures.store import Store, filled

from .conftest import tool

MAX_BYTES = 150_000
# Root mean square, of 255: one word more is 3. The same code draws the same pixels, but for what a processor rounds.
MAX_UNLIKE = 0.5
FREE = 'highwater_device_memory_free_bytes{instance="10.0.0.1:8002"}'
HIGH = 'max(highwater_policy_high_water_bytes{instance="10.0.0.1:8002", rule="device"})'
# What brings no data in this scene, by what the query contains, and why. All else must.
EMPTY_HERE = {
    "highwater_control_denied_total": "nobody tried without a token",
    "up{": "every sidecar can be scraped",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Store]:
    """A real Prometheus that holds the scene."""
    for name in ("prometheus", "promtool"):
        tool(name)
    with filled(tmp_path_factory.mktemp("scene") / "prometheus") as running:
        yield running


def queries() -> list[tuple[str, str]]:
    return [
        (f"{name}: {row.title}: {panel['title']}", filled_in(target["expr"]))
        for name in NAMES
        for row in rows(name)
        for panel in row.panels
        for target in panel["targets"]
    ]


def test_every_panel_brings_data_or_is_listed_with_the_reason(store: Store):
    asked = queries()
    assert len(asked) > 100
    empty = {where: query for where, query in asked if not store.range(query)}
    assert {where for where, query in empty.items() if not any(part in query for part in EMPTY_HERE)} == set()
    assert [part for part in EMPTY_HERE if not any(part in query for _, query in asked)] == []


def test_the_first_remedy_of_a_kind_is_shown(store: Store):
    """Its series begins with it, at 1: both times that memory was short are bars."""
    (query,) = [query for where, query in queries() if where == "server: Policy and resets: Remedies"]
    released = [row for row in store.range(query) if row["metric"]["remedy"] == "release"]
    moments = [float(at) for row in released for at, _ in row["values"]]
    assert len([at for at, before in zip(moments, [0.0, *moments], strict=False) if at - before > 300]) == 2
    assert {row["metric"]["outcome"] for row in released} == {"done"}


def test_alerts_fire_in_the_scene_where_they_should(store: Store):
    fired = {(row["metric"]["alertname"], row["metric"]["pod"]) for row in store.range("ALERTS")}
    assert {("HighwaterEngineGone", "vl-0"), ("HighwaterIncident", "vl-0")} <= fired
    assert not {name for name, pod in fired if pod != "vl-0"} & {"HighwaterEngineGone", "HighwaterServerErrors"}
    assert {row["metric"]["model"] for row in store.range("ALERTS") if row["metric"]["pod"] == "vl-0"} == {"vl-8b"}


def test_a_firing_alert_has_the_number_of_its_severity(store: Store):
    for where, query in queries():
        if where.endswith("Alerts"):
            found = {row["metric"]["alertname"]: {value for _, value in row["values"]} for row in store.range(query)}
            assert (found["HighwaterServerErrors"], found["HighwaterEngineGone"]) == ({"3"}, {"2"})
            assert found.keys() == {row["metric"]["alertname"] for row in store.range("ALERTS")}, where


def test_headroom_has_the_colour_of_the_rules_own_waters(store: Store):
    free, low, high = [query for where, query in queries() if where == "server: At a glance: Headroom, worst rank"]
    moments = [{at for row in store.range(query) for at, _ in row["values"]} for query in (free, low, high)]
    assert all(moments)
    assert sum(map(len, moments)) == len(set().union(*moments))
    short = {at for row in store.range(f"{HIGH} > min({FREE})") for at, _ in row["values"]}
    assert moments[2] == short


@pytest.mark.parametrize("name", all_rows())
def test_every_row_can_be_drawn_and_what_the_documentation_shows_is_so(store: Store, tmp_path: Path, name: str):
    path = tmp_path / f"{name}.png"
    draw(all_rows()[name], store, path)
    assert path.stat().st_size > 1_000
    if name in SHOWN:
        assert compare_images(str(IMAGES / f"grafana-{name}.png"), str(path), MAX_UNLIKE) is None


def test_the_pictures_beside_the_page_are_those_that_it_shows():
    page = (IMAGES.parent / "grafana.md").read_text(encoding="utf-8")
    assert re.findall(r"\(images/(grafana-[\w-]+\.png)\)", page) == [f"grafana-{each}.png" for each in SHOWN]
    assert {path.name for path in IMAGES.glob("grafana-*.png")} == {f"grafana-{each}.png" for each in SHOWN}
    assert all(path.stat().st_size < MAX_BYTES for path in IMAGES.glob("grafana-*.png"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3 * 1024**3, "bytes", "3 GiB"),
        (0.0, "bytes", "0 B"),
        (2048.0, "binBps", "2 KiB/s"),
        (0.925, "percentunit", "92.5 %"),
        (0.04, "s", "40 ms"),
        (5400, "s", "1.5 h"),
        (7, "reqps", "7 req/s"),
        (3, "short", "3"),
    ],
)
def test_a_value_is_shown_in_its_unit(value: float, unit: str, text: str):
    """As Grafana does."""
    assert shown(value, unit) == text
