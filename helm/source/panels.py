"""Panels in one style: each with a unit, and with a description that ends in the HELP texts of what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from app.components import COMPONENTS
from helm.source.metrics import help_of, names_in

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

# Grafana's names of units: bytes are shown in KiB, MiB, GiB.
BYTES, BYTES_PER_SECOND, RATIO, SECONDS, COUNT, PER_SECOND = "bytes", "binBps", "percentunit", "s", "short", "cps"

# The same meaning has the same colour in every panel.
GREEN, YELLOW, ORANGE, RED, GREY, BLUE = "green", "yellow", "orange", "red", "#8e8e8e", "blue"
COMPONENT_COLORS = {row.label: row.grafana for row in COMPONENTS}
STATE_COLORS = {
    "ready": GREEN,
    "starting": BLUE,
    "paused": YELLOW,
    "sleeping": GREY,
    "busy": YELLOW,
    "slow": ORANGE,
    "stuck": RED,
    "not_answering": RED,
    "gone": RED,
    "calm": GREEN,
    "short": ORANGE,
    "urgent": RED,
    "acting": YELLOW,
    "resting": BLUE,
    "held": GREY,
    "unknown": GREY,
    "act": GREEN,
    "observe": YELLOW,
}

Builder: TypeAlias = stat.Panel | timeseries.Panel | table.Panel | statetimeline.Panel
Steps: TypeAlias = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL.
        legend: What its series are called.
        line: Drawn as a line of this colour over a stack, not as part of it.
        hidden_name: What a table's column of its values is called.
    """

    expr: str
    legend: str = ""
    line: str | None = None
    column: str = ""


def described(text: str, queries: Sequence[Query]) -> str:
    """The panel's own sentence, and what each family that it reads means.

    Raises:
        UnknownMetricError: A query reads what is not exported.
    """
    families = dict.fromkeys(family for query in queries for family in names_in(query.expr))
    return "\n".join([text, "", *(f"- `{family}`: {help_of(family)}" for family in families)])


def _targets(queries: Sequence[Query], *, instant: bool, as_table: bool = False) -> list[prometheus.Dataquery]:
    targets = []
    for number, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + number)).datasource(DATASOURCE)
        target = target.instant() if instant else target.range()
        target.format(PromQueryFormat.TABLE if as_table else PromQueryFormat.TIME_SERIES)
        targets.append(target.legend_format(query.legend or "__auto"))
    return targets


def _dressed(panel: Any, title: str, text: str, queries: Sequence[Query], *, unit: str, width: int, height: int) -> Any:
    """What every kind of panel has."""
    panel.title(title).description(described(text, queries)).datasource(DATASOURCE)
    panel.unit(unit).span(width).height(height)
    return panel


def _thresholds(steps: Steps) -> dashboards.ThresholdsConfig:
    """The first colour is that of everything under the second step."""
    made = [
        models.Threshold(value=None if number == 0 else at, color=color) for number, (at, color) in enumerate(steps)
    ]
    return dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _color(color: str) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})]


def stat_panel(
    title: str,
    text: str,
    query: Query,
    *,
    unit: str,
    steps: Steps = ((0, GREEN),),
    names: bool = False,
    empty: str | None = None,
    width: int = 3,
) -> stat.Panel:
    """One number, coloured by thresholds; or, with `names`, the names of the series that there are."""
    panel = _dressed(stat.Panel(), title, text, [query], unit=unit, width=width, height=4)
    panel.with_target(_targets([query], instant=True)[0])
    panel.graph_mode(common.BigValueGraphMode.NONE).color_mode(common.BigValueColorMode.BACKGROUND)
    panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(steps)).color_scheme(dashboards.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    if names:
        panel.text_mode(common.BigValueTextMode.NAME)
        for name, color in STATE_COLORS.items():
            panel.override_by_name(name, _color(color))
    if empty is not None:
        panel.no_value(empty)
    return panel


def series_panel(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str,
    stacked: bool = False,
    bars: bool = False,
    steps: Steps | None = None,
    width: int = 12,
    height: int = 8,
    at_least: float | None = 0,
    at_most: float | None = None,
) -> timeseries.Panel:
    """Series over time; those with a colour of their own are lines over the stack.

    Args:
        title: Its title.
        text: What it shows, for whoever sees it for the first time.
        queries: What is drawn.
        unit: Grafana's name of the unit.
        stacked: One upon the other.
        bars: For what happens now and then.
        steps: Dashed lines at these values.
        width: Of 24.
        height: In rows.
        at_least: Where the axis begins.
        at_most: Where the axis ends.
    """
    panel = _dressed(timeseries.Panel(), title, text, queries, unit=unit, width=width, height=height)
    panel.targets(_targets(queries, instant=False))
    panel.legend(
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    panel.tooltip(
        common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    panel.show_points(common.VisibilityMode.NEVER).line_width(1).fill_opacity(60 if stacked else 0)
    panel.draw_style(common.GraphDrawStyle.BARS if bars else common.GraphDrawStyle.LINE)
    if bars:
        panel.fill_opacity(80)
    if stacked or bars:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if steps is not None:
        panel.thresholds(_thresholds(steps))
        panel.thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    if at_least is not None:
        panel.min(at_least)
    if at_most is not None:
        panel.max(at_most)
    for name, color in (COMPONENT_COLORS if stacked else {}).items():
        panel.override_by_name(name, _color(color))
    for number, query in enumerate(queries):
        if query.line is not None:
            panel.override_by_query(chr(ord("A") + number), _as_line(query.line))
    return panel


def _as_line(color: str) -> list[models.DynamicConfigValue]:
    return [
        *_color(color),
        models.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "A"}),
        models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        models.DynamicConfigValue(id_val="custom.lineWidth", value=2),
        models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 6]}),
    ]


def states_panel(
    title: str, text: str, query: Query, *, width: int = 12, height: int = 5, empty: str | None = None
) -> statetimeline.Panel:
    """Which of several states holds, over time: a row for each series, coloured where it is 1."""
    panel = _dressed(statetimeline.Panel(), title, text, [query], unit="none", width=width, height=height)
    panel.targets(_targets([query], instant=False))
    panel.show_value(common.VisibilityMode.NEVER).merge_values(True).fill_opacity(80).line_width(0)
    shown = {
        "0": models.ValueMappingResult(text="no", color="transparent", index=0),
        "1": models.ValueMappingResult(text="yes", color=GREEN, index=1),
    }
    panel.mappings([models.ValueMap(options=shown)])
    if empty is not None:
        panel.no_value(empty)
    return panel


def table_panel(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    units: dict[str, str],
    steps: dict[str, Steps],
    links: dict[str, str],
    order: Sequence[str],
    sort_by: str,
    height: int = 12,
) -> table.Panel:
    """One row for each set of labels, one column for each query.

    Args:
        title: Its title.
        text: What it shows.
        queries: Each with the name of its column, all by the same labels.
        units: By column.
        steps: Thresholds that colour a column's cells.
        links: Where a cell of a column leads.
        order: Of the columns; those that are not named are not shown.
        sort_by: The column whose largest value is on top.
        height: In rows.
    """
    panel = _dressed(table.Panel(), title, text, queries, unit="none", width=24, height=height)
    panel.targets(_targets(queries, instant=True, as_table=True))
    values = {f"Value #{chr(ord('A') + number)}": query.column for number, query in enumerate(queries) if query.column}
    unnamed = {f"Value #{chr(ord('A') + number)}": True for number, query in enumerate(queries) if not query.column}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, **unnamed},
                "indexByName": {_source(name, values): number for number, name in enumerate(order)},
                "renameByName": values,
            },
        )
    )
    for column in sorted({*units, *steps, *links}):
        panel.override_by_name(column, _column(units.get(column), steps.get(column), links.get(column)))
    panel.sort_by([common_builders.TableSortByFieldState().display_name(sort_by).desc(True)])
    return panel


def _source(name: str, values: dict[str, str]) -> str:
    return next((source for source, shown in values.items() if shown == name), name)


def _column(unit: str | None, steps: Steps | None, link: str | None) -> list[models.DynamicConfigValue]:
    properties = []
    if unit is not None:
        properties.append(models.DynamicConfigValue(id_val="unit", value=unit))
    if steps is not None:
        properties += [
            models.DynamicConfigValue(id_val="thresholds", value=_thresholds(steps).build()),
            models.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-background", "mode": "basic"}),
        ]
    if link is not None:
        shown = [{"title": "Open this server", "url": link}]
        properties.append(models.DynamicConfigValue(id_val="links", value=shown))
    return properties
