"""What both dashboards have: the data source to choose, resets as annotations, rows, and the JSON that is written."""

from __future__ import annotations

import json
from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from helm.source.metrics import names_in
from helm.source.panels import DATASOURCE, Builder

TAG = "highwater"


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


def resets_annotation(name: str, selector: str, color: str, *, enable: bool = True) -> dashboards.AnnotationQuery:
    """A mark at every reset that a selector finds.

    A reset's series begins with its first reset: `increase` would never see that one.
    """
    resets = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}})"
    before = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}} offset $__interval)"
    expr = f"(({resets}) - ({before}) > 0) or (({resets}) unless ({before}))"
    names_in(expr)
    return _Annotation().name(name).datasource(DATASOURCE).enable(enable).icon_color(color).expr(expr)


def label_variable(name: str, label: str, of: str, text: str, *, multi: bool = True) -> dashboards.QueryVariable:
    """A variable whose values are those of a label; one that no target has stays at All.

    Args:
        name: Of the variable and of the label.
        label: Shown beside it.
        of: The series that have the label.
        text: What it chooses.
        multi: Whether several may be chosen, or All.
    """
    names_in(of)
    variable = dashboards.QueryVariable(name).label(label).description(text).datasource(DATASOURCE)
    variable.query({"query": f"label_values({of}, {name})", "refId": f"variable-{name}"})
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.NATURAL_ASC)
    if multi:
        everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
        variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable


class Board:
    """A dashboard that grows row by row, every panel numbered in its order.

    Args:
        uid: By which the other one links to it.
        title: Its title.
        text: What it is for.
    """

    def __init__(self, uid: str, title: str, text: str) -> None:
        self._numbers = 0
        self._board = dashboards.Dashboard(title).uid(uid).description(text).tags([TAG]).editable()
        self._board.time("now-3h", "now").refresh("30s").timezone("browser").tooltip(models.DashboardCursorSync.TOOLTIP)
        source = dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus")
        self._board.with_variable(source)
        others = dashboards.DashboardLink("Highwater").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
        self._board.link(others.as_dropdown(True).include_vars(False).keep_time(True))

    def variables(self, *variables: dashboards.QueryVariable) -> None:
        """Add variables."""
        for variable in variables:
            self._board.with_variable(variable)

    def annotations(self, *annotations: dashboards.AnnotationQuery) -> None:
        """Add annotations."""
        for annotation in annotations:
            self._board.annotation(annotation)

    def row(self, title: str, panels: Sequence[Builder]) -> None:
        """Add a row that is open."""
        self._board.with_row(dashboards.Row(title).id(self._number()))
        for panel in panels:
            self._board.with_panel(panel.id(self._number()))

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def json(self) -> str:
        """The dashboard as Grafana loads it."""
        return json.dumps(self._board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
