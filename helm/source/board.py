"""A dashboard from its YAML: variables, resets as annotations, rows of panels, and the JSON that is written."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from helm.source.metrics import names_in
from helm.source.panels import DATASOURCE, GRAFANA, Json, Query, panel

GRID_WIDTH = 24
Plan: TypeAlias = dict[str, Any]  # a dashboard, a variable or a panel as YAML holds it


def dashboard(path: Path) -> str:
    """Return the dashboard of a YAML file as Grafana loads it: JSON, every panel numbered in its order."""
    plan: Plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    names: Mapping[str, str] = plan["names"]
    variables = [GRAFANA["datasource"], *(_variable(each, names) for each in plan["variables"]), GRAFANA["runbooks"]]
    board = GRAFANA["board"] | {
        "title": plan["title"],
        "uid": f"highwater-{path.stem}",
        "description": plan["text"],
        "templating": {"list": variables},
        "annotations": {"list": [_resets(each, names) for each in plan["annotations"]]},
        "panels": list(_rows(plan["rows"], names)),
    }
    return json.dumps(board, indent=2, sort_keys=True) + "\n"


def filled_in(expr: str, names: Mapping[str, str]) -> str:
    """Return a query with its names, words in capitals, replaced by their meaning, which may hold names too."""
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    while word.search(expr):
        expr = word.sub(lambda found: names[found[0]], expr)
    return expr


def _rows(rows: Iterable[Plan], names: Mapping[str, str]) -> Iterator[Json]:
    numbers = itertools.count(1)
    top = 0
    for place, plan in enumerate(rows):
        row = {"type": "row", "title": plan["row"], "id": next(numbers), "collapsed": False, "panels": []}
        row["gridPos"] = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top}
        panels = [_panel(each, names) | {"id": next(numbers)} for each in plan["panels"]]
        left, top, tallest = 0, top + 1, 0
        for each in panels:  # from the left, line by line
            each["gridPos"] |= {"x": left, "y": top}
            left, tallest = left + each["gridPos"]["w"], max(tallest, each["gridPos"]["h"])
            if left >= GRID_WIDTH:
                left, top, tallest = 0, top + tallest, 0
        top += tallest
        if place == 0 or plan.get("open", False):
            yield row
            yield from panels
        else:  # its queries are not sent until somebody opens the row
            yield row | {"collapsed": True, "panels": panels}


def _variable(plan: Plan, names: Mapping[str, str]) -> Json:
    """Return a variable whose values are those of a label of its name; one that no target has stays at All."""
    name, of = plan["name"], filled_in(plan["of"], names)
    names_in(of)
    return GRAFANA["variable_with_all" if plan.get("multi", True) else "variable"] | {
        "name": name,
        "label": plan["label"],
        "description": plan["text"],
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({of}, {name})", "refId": f"variable-{name}"},
    }


def _coded(first: int, family: str, label: str, values: list[str], by: str = "") -> str:
    """Return a query for the number, from `first` on, of the value of a label for which a family is 1 now."""
    each = " or ".join(
        f'{number} * ({family}{{SERVER, {label}="{value}"}} == 1)' for number, value in enumerate(values, first)
    )
    return f"max by ({by}) ({each})"


def _resets(plan: Plan, names: Mapping[str, str]) -> Json:
    """Return the marks at every reset that a selector finds.

    A reset's series begins with its first reset: `increase` would never see that one.
    """
    selector = filled_in(plan["of"], names)
    resets = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}})"
    before = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}} offset $__interval)"
    expr = f"(({resets}) - ({before}) > 0) or (({resets}) unless ({before}))"
    names_in(expr)
    own = {"name": plan["name"], "datasource": DATASOURCE, "iconColor": plan["color"], "expr": expr}
    return GRAFANA["reset"] | own


def _panel(plan: Plan, names: Mapping[str, str]) -> Json:
    """Return a panel: the first key is its kind, and what is no query is an option of that kind."""
    options = dict(plan)
    kind = next(iter(plan))
    columns = options.pop("columns", [])
    by_legend = options.pop("queries", {})
    if "query" in options:
        by_legend = {"": options.pop("query")}
    queries = [
        Query(filled_in(expr, names), legend)
        for legend, exprs in by_legend.items()
        for expr in ([exprs] if isinstance(exprs, str) else exprs)
    ]
    queries += [Query(filled_in(each.pop("expr"), names), column=each) for each in columns]
    if "coded" in options:
        options["values"] = []
        for legend, coded in options.pop("coded").items():
            queries.append(Query(filled_in(_coded(len(options["values"]) + 1, **coded), names), legend))
            options["values"] += coded["values"]
    return panel(kind, options.pop(kind), options.pop("text"), queries, **options)
