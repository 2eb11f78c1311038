"""A dashboard from its YAML: variables, resets as annotations, rows of panels, and the JSON that is written."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from helm.source.metrics import names_in
from helm.source.panels import DATASOURCE, KINDS, Builder, Query

TAG = "highwater"
# As a sidecar serves them that somebody on call has forwarded to themselves (docs/oncall.md).
RUNBOOKS = "http://127.0.0.1:8001/docs/runbooks"
Plan: TypeAlias = dict[str, Any]
"""What YAML holds of a dashboard, a variable or a panel."""


class ResetAnnotation(models.AnnotationQuery):
    """Prometheus' own keys of an annotation, which the SDK's type leaves out."""

    def to_json(self) -> dict[str, object]:
        """As Grafana keeps it."""
        return super().to_json() | {
            "step": "",
            "titleFormat": "{{remedy}} {{outcome}}",
            "textFormat": "{{trigger}}: {{remedy}} {{outcome}}",
            "tagKeys": "remedy,outcome,trigger",
            "useValueForTime": False,
        }


class _Annotation(dashboards.AnnotationQuery):
    def __init__(self) -> None:
        self._internal = ResetAnnotation()


def dashboard(path: Path) -> str:
    """The dashboard of a YAML file as Grafana loads it: JSON, every panel numbered in its order."""
    plan: Plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    names: Mapping[str, str] = plan["names"]
    board = dashboards.Dashboard(plan["title"]).uid(f"{TAG}-{path.stem}").description(plan["text"]).tags([TAG])
    board.editable().time("now-3h", "now").refresh("30s").timezone("browser")
    board.tooltip(models.DashboardCursorSync.TOOLTIP)
    board.with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    others = dashboards.DashboardLink("Highwater").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    board.link(others.as_dropdown(True).include_vars(False).keep_time(True))
    for variable in plan["variables"]:
        board.with_variable(_variable(variable, names))
    runbooks = dashboards.TextBoxVariable("runbooks").label("Runbooks").default_value(RUNBOOKS)
    board.with_variable(runbooks.description("Where a click on an alert leads: the published pages, or a sidecar's."))
    for annotation in plan["annotations"]:
        board.annotation(_resets(annotation, names))
    numbers = itertools.count(1)
    for place, row in enumerate(plan["rows"]):
        head, is_open = dashboards.Row(row["row"]).id(next(numbers)), place == 0 or row.get("open", False)
        panels = [_panel(panel, names).id(next(numbers)) for panel in row["panels"]]
        if not is_open:
            # Their queries are not asked until somebody opens the row.
            head.collapsed(True)
            for panel in panels:
                head.with_panel(panel)
        board.with_row(head)
        for panel in panels if is_open else ():
            board.with_panel(panel)
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def filled_in(expr: str, names: Mapping[str, str]) -> str:
    """A query with its names, words in capitals, replaced by what they stand for; that may hold names too."""
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    while word.search(expr):
        expr = word.sub(lambda found: names[found[0]], expr)
    return expr


def _variable(plan: Plan, names: Mapping[str, str]) -> dashboards.QueryVariable:
    """A variable whose values are those of a label of its name; one that no target has stays at All."""
    name, of = plan["name"], filled_in(plan["of"], names)
    names_in(of)
    variable = dashboards.QueryVariable(name).label(plan["label"]).description(plan["text"]).datasource(DATASOURCE)
    variable.query({"query": f"label_values({of}, {name})", "refId": f"variable-{name}"})
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.NATURAL_ASC)
    if plan.get("multi", True):
        everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
        variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable


def _coded(family: str, label: str, values: list[str], by: str = "", selector: str = "SERVER") -> str:
    """A query for the number, from 1 on, of the value that holds now, of a family that is 1 for one of its label's."""
    each = " or ".join(
        f'{number} * ({family}{{{selector}, {label}="{value}"}} == 1)' for number, value in enumerate(values, 1)
    )
    return f"max by ({by}) ({each})"


def _resets(plan: Plan, names: Mapping[str, str]) -> dashboards.AnnotationQuery:
    """A mark at every reset that a selector finds.

    A reset's series begins with its first reset: `increase` would never see that one.
    """
    selector = filled_in(plan["of"], names)
    resets = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}})"
    before = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}} offset $__interval)"
    expr = f"(({resets}) - ({before}) > 0) or (({resets}) unless ({before}))"
    names_in(expr)
    annotation = _Annotation().name(plan["name"]).datasource(DATASOURCE).enable(True)
    return annotation.icon_color(plan["color"]).expr(expr)


def _panel(plan: Plan, names: Mapping[str, str]) -> Builder:
    """A panel: the first key is its kind, what is no query is an option of that kind."""
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
        coded = options.pop("coded")
        options["values"] = coded["values"]
        queries = [Query(filled_in(_coded(**coded), names), options.pop("legend"))]
    return KINDS[kind](options.pop(kind), options.pop("text"), queries, **options)
