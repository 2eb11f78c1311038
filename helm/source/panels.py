"""Panels in one style: each with a unit, and with a description that ends in the HELP texts of what it reads.

Their arguments are what the dashboards' YAML may say of a panel of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from helm.source.metrics import help_of, names_in
from highwater.accounting.components import COMPONENTS

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

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
Steps: TypeAlias = Mapping[float, str]
"""Colours, each from its value on; the first is that of everything under the second."""


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL.
        legend: What its series are called.
        column: Of a table: the `name`, `unit` and `steps` of the column of its values; without a name it is not shown.
    """

    expr: str
    legend: str = ""
    column: Mapping[str, Any] = field(default_factory=dict)


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
    made = [
        models.Threshold(value=None if number == 0 else at, color=color)
        for number, (at, color) in enumerate(steps.items())
    ]
    return dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _with_empty(panel: Any, empty: str | None) -> Any:
    return panel if empty is None else panel.no_value(empty)


def _color(color: str) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})]


def stat_panel(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str = "none",
    steps: Steps = {0: GREEN},  # noqa: B006 - nobody changes it
    names: bool = False,
    empty: str | None = None,
    width: int = 3,
) -> stat.Panel:
    """One number, coloured by thresholds; or, with `names`, the names of the series that there are."""
    panel = _dressed(stat.Panel(), title, text, queries, unit=unit, width=width, height=4)
    panel.targets(_targets(queries, instant=True))
    panel.graph_mode(common.BigValueGraphMode.NONE).color_mode(common.BigValueColorMode.BACKGROUND)
    panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(steps)).color_scheme(dashboards.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    if names:
        panel.text_mode(common.BigValueTextMode.NAME)
        for name, color in STATE_COLORS.items():
            panel.override_by_name(name, _color(color))
    return _with_empty(panel, empty)


def series_panel(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str = "none",
    stacked: bool = False,
    bars: bool = False,
    lines: Mapping[str, str] = {},
    steps: Steps | None = None,
    width: int = 12,
    height: int = 8,
    at_least: float | None = 0,
    at_most: float | None = None,
    empty: str | None = None,
    repeat: str | None = None,
) -> timeseries.Panel:
    """Series over time.

    Args:
        title: Its title.
        text: What it shows, for whoever sees it for the first time.
        queries: What is drawn.
        unit: Grafana's name of the unit.
        stacked: One upon the other.
        bars: For what happens now and then.
        lines: Legends that are drawn as a line of this colour over a stack, not as part of it.
        steps: Dashed lines at these values.
        width: Of 24.
        height: In rows.
        at_least: Where the axis begins.
        at_most: Where the axis ends.
        empty: Shown where there is nothing.
        repeat: A variable of which every value has a panel of its own.
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
        if query.legend in lines:
            panel.override_by_query(chr(ord("A") + number), _as_line(lines[query.legend]))
    if repeat is not None:
        panel.repeat(repeat).repeat_direction("h").max_per_row(4)
    return _with_empty(panel, empty)


def _as_line(color: str) -> list[models.DynamicConfigValue]:
    return [
        *_color(color),
        models.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "A"}),
        models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        models.DynamicConfigValue(id_val="custom.lineWidth", value=2),
        models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 6]}),
    ]


def states_panel(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    values: Sequence[str] = (),
    link: str | None = None,
    width: int = 12,
    height: int = 5,
    empty: str | None = None,
) -> statetimeline.Panel:
    """Which of several states holds, over time: a row for each series.

    Args:
        title: Its title.
        text: What it shows.
        queries: What is drawn: 1 where it holds; with `values` the number of the one that does.
        values: What the numbers from 1 on mean, each shown by its name and in its colour.
        link: Where a click leads.
        width: Of 24.
        height: In rows.
        empty: Shown where there is nothing.
    """
    panel = _dressed(statetimeline.Panel(), title, text, queries, unit="none", width=width, height=height)
    panel.targets(_targets(queries, instant=False))
    panel.show_value(common.VisibilityMode.AUTO if values else common.VisibilityMode.NEVER)
    panel.merge_values(True).fill_opacity(80).line_width(0)
    shown = {
        "0": models.ValueMappingResult(text="no", color="transparent", index=0),
        "1": models.ValueMappingResult(text="yes", color=GREEN, index=1),
    }
    if values:
        shown = {
            str(number): models.ValueMappingResult(text=value, color=STATE_COLORS[value], index=number)
            for number, value in enumerate(values, 1)
        }
    panel.mappings([models.ValueMap(options=shown)])
    if link is not None:
        panel.data_links([dashboards.DashboardLink("Runbook").url(link).target_blank(True)])
    return _with_empty(panel, empty)


def table_panel(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    labels: Sequence[str],
    links: Mapping[str, str],
    sort_by: str,
    height: int = 12,
) -> table.Panel:
    """One row for each set of labels, one column for each query.

    Args:
        title: Its title.
        text: What it shows.
        queries: Each with its column, all by the same labels.
        labels: Columns that stand before those of the queries.
        links: Where a cell of a column leads.
        sort_by: The column whose largest value is on top.
        height: In rows.
    """
    panel = _dressed(table.Panel(), title, text, queries, unit="none", width=24, height=height)
    panel.targets(_targets(queries, instant=True, as_table=True))
    values = {f"Value #{chr(ord('A') + number)}": query.column.get("name") for number, query in enumerate(queries)}
    named = {source: name for source, name in values.items() if name}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, **{source: True for source in values if source not in named}},
                "indexByName": {name: number for number, name in enumerate((*labels, *named))},
                "renameByName": named,
            },
        )
    )
    columns = {query.column["name"]: query.column for query in queries if "name" in query.column}
    for name in sorted({*(name for name, column in columns.items() if len(column) > 1), *links}):
        column = columns.get(name, {})
        panel.override_by_name(name, _column(column.get("unit"), column.get("steps"), links.get(name)))
    panel.sort_by([common_builders.TableSortByFieldState().display_name(sort_by).desc(True)])
    return panel


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


KINDS: Mapping[str, Callable[..., Builder]] = {
    "stat": stat_panel,
    "series": series_panel,
    "states": states_panel,
    "table": table_panel,
}
