"""The scene that the pictures of the dashboards are drawn from: no panel of it is empty without a reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observability.pictures.boards import NAMES, filled_in, rows
from tests.observability.pictures.store import Store, filled

from .conftest import tool

# What brings no data in this scene, by what the query contains, and why. All else must.
EMPTY_HERE = {
    "highwater_control_denied_total": "nobody tried without a token",
    "up{": "every sidecar can be scraped",
    " unless max(highwater_policy_low_water_bytes": "each server has a rule that watches free bytes",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Store]:
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
    remedies = [query for where, query in queries() if where == "server: Policy and remedies: Remedies"]
    (query,) = [query for query in remedies if "highwater_resets_total" in query]
    released = [row for row in store.range(query) if row["metric"]["remedy"] == "release"]
    moments = [float(at) for row in released for at, _ in row["values"]]
    assert len([at for at, before in zip(moments, [0.0, *moments], strict=False) if at - before > 300]) == 2
    assert {row["metric"]["outcome"] for row in released} == {"done"}


def test_alerts_fire_in_the_scene_where_they_should(store: Store):
    fired = {
        (row["metric"]["alertname"], row["metric"].get("reason"), row["metric"]["pod"]) for row in store.range("ALERTS")
    }
    assert ("HighwaterEngineDown", "died", "vl-0") in fired
    assert not {name for name, _, pod in fired if pod != "vl-0"} & {"HighwaterEngineDown", "HighwaterServerErrors"}
    assert {row["metric"]["model"] for row in store.range("ALERTS") if row["metric"]["pod"] == "vl-0"} == {"vl-8b"}
