"""A component of device memory is known in few places, and every one of them has it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields, replace
from pathlib import Path

from highwater.accounting import components
from highwater.accounting.components import BY_NAME, COMPONENT_NAMES, STACKED
from highwater.accounting.points import ROW
from highwater.readings.rank import Components

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder, ending in (
        ("app", "py"),
        ("app", "js"),
        ("app", "css"),
        ("worker_ext", "py"),
        ("helm/source", "py"),
    )
    for path in (ROOT / folder).rglob(f"*.{ending}")
]
# Written by `make docs` from app/highwater/accounting/components.py.
WRITTEN = {"app/highwater/dashboard/facts.js", "app/highwater/dashboard/components.css"}


def test_every_component_has_its_row():
    """In the order of the accounting, and nothing twice that must tell them apart."""
    assert tuple(BY_NAME) == COMPONENT_NAMES == tuple(field.name for field in fields(Components))
    for what in ("title", "meaning", "explained", "letter", "terminal", "light", "dark", "grafana", "layer"):
        assert len({getattr(row, what) for row in components.COMPONENTS}) == len(COMPONENT_NAMES), what
    assert sorted(row.layer for row in STACKED) == list(range(len(COMPONENT_NAMES)))


def test_everybody_who_shows_components_shows_them_all():
    """History, terminal, page and Grafana take theirs from the rows."""
    page = (ROOT / "app/highwater/dashboard/facts.js").read_text()
    board = (ROOT / "helm/dashboards/highwater-server.json").read_text()
    style = (ROOT / "app/highwater/dashboard/components.css").read_text()
    assert set(COMPONENT_NAMES) <= set(ROW)
    assert re.findall(r'field: "(\w+)"', page) == [row.name for row in STACKED]
    for row in components.COMPONENTS:
        assert style.count(f"{row.variable}:") == 2, "light and dark"
        assert f'"fixedColor": "{row.grafana}"' in board


def test_one_more_component_touches_six_files_at_most():
    """Those that name the weights, which the worker reads and the accounting places on its own: the next one is alike.

    How the worker measures it (`worker_ext/highwater_worker/memory/weights.py`) is a file of its own, and the budget of
    a start has parts of its own, in vLLM's terms.
    """
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if re.search(r"\bweights_bytes\b|\"weights\"|--c-weights\b", path.read_text(encoding="utf-8"))
    }
    of_the_start = re.compile(
        r"app/kvplan/|app/highwater/(plan/|commands/(explain|plan)|\w+/(engine_)?budget)|worker_ext/.*/(plan/\w+|engine_budget|start_phases)\.py"
    )
    own = {
        "worker_ext/highwater_worker/memory/weights.py",
        "worker_ext/highwater_worker/encoder_cache/sleep.py",  # vLLM's name for a pool that sleeps
    }
    assert {name for name in naming - WRITTEN - own if of_the_start.match(name) is None} == {
        "app/highwater/accounting/components.py",
        "app/highwater/readings/rank.py",
        "app/highwater/recorder/rank.py",
        "worker_ext/highwater_worker/operations/memory.py",
        "worker_ext/highwater_worker/recorder/sampler.py",
    }


def test_a_component_that_is_added_is_written_everywhere(monkeypatch):
    """One more row: the page, its colours and the documentation have it without another change."""
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    added = replace(BY_NAME["weights_bytes"], name="graphs_bytes", title="graphs", light="#123456", layer=6)
    for name, rows in (("COMPONENTS", components.COMPONENTS), ("STACKED", STACKED)):
        monkeypatch.setattr(tables, name, (*rows, added))
    assert 'field: "graphs_bytes", name: "graphs", variable: "--c-graphs"' in tables.facts_module()
    assert "--c-graphs: #123456;" in tables.components_style()
    assert "| `graphs_bytes` " in tables.components_table()
