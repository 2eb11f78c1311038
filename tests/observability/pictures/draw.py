"""Draws a dashboard's row: stats, series, states and tables, each where the dashboard has it.

No imitation of Grafana: what counts is that queries, units, names, colours and places are the dashboard's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.observability.pictures.boards import Row, filled_in
from tests.observability.pictures.store import BEGAN, STEP_SECONDS, Store

_COLUMNS: Final = 24
# Inches of a column and of a row of the grid, and dots to an inch.
_WIDE, _HIGH, _DPI = 0.55, 0.32, 72
_NAMED: Final = {
    "green": "#56a64b",
    "yellow": "#e0b400",
    "orange": "#e5791b",
    "red": "#d0021b",
    "blue": "#3274d9",
    "purple": "#8f3bb8",
}
_MAX_LEGEND, _MAX_LINES, _MAX_ROWS = 8, 4, 14


def draw(row: Row, store: Store, path: Path) -> None:
    """Draw one row into a PNG."""
    mpl.rcParams.update({"font.size": 7, "axes.titlesize": 8, "font.family": "DejaVu Sans"})
    top = min(panel["gridPos"]["y"] for panel in row.panels)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in row.panels) - top
    figure = Figure(figsize=(_COLUMNS * _WIDE, height * _HIGH), dpi=_DPI, facecolor="white")
    for panel in row.panels:
        place = panel["gridPos"]
        left, width = place["x"] / _COLUMNS, place["w"] / _COLUMNS
        bottom, tall = 1 - (place["y"] - top + place["h"]) / height, place["h"] / height
        below, margin = (0.2, 0.005) if panel["type"] == "stat" else (1.0, 0.045)
        inner = (left + margin, bottom + below / height, width - margin - 0.012, tall - (below + 1.2) / height)
        axes = figure.add_axes(inner)
        axes.set_title(filled_in(panel["title"]), loc="left", pad=3, fontweight="bold")
        _KINDS[panel["type"]](axes, panel, store)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No version and no date in the file: the same picture is the same bytes.
    figure.savefig(path, metadata={"Software": None})


def answers(panel: dict[str, Any], store: Store) -> list[tuple[str, list[dict[str, Any]]]]:
    """What each query of a panel brings, with its legend."""
    ask = store.instant if panel["type"] in {"stat", "table"} else store.range
    return [(target["legendFormat"], ask(filled_in(target["expr"]))) for target in panel["targets"]]


def shown(value: float, unit: str) -> str:
    """A value in a unit that Grafana knows."""
    if unit in {"bytes", "binBps"}:
        step = max(min(int(math.log(abs(value), 1024)), 4), 0) if abs(value) >= 1 else 0
        return f"{value / 1024**step:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}{'/s' if unit == 'binBps' else ''}"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return _duration(value)
    if unit.startswith("dateTime"):
        return datetime.fromtimestamp(value / 1000, UTC).strftime("%H:%M:%S")
    return f"{value:.3g}{ {'reqps': ' req/s', 'cps': '/s'}.get(unit, '') }"


def _duration(seconds: float) -> str:
    if abs(seconds) < 1:
        return f"{1000 * seconds:.3g} ms"
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"


def _name(legend: str, labels: dict[str, str]) -> str:
    if legend == "__auto":
        return ", ".join(value for key, value in labels.items() if key != "__name__")
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def _stat(axes: Axes, panel: dict[str, Any], store: Store) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    defaults, lines, colors = panel["fieldConfig"]["defaults"], [], []
    mode = panel["options"].get("textMode")
    for legend, found in answers(panel, store):
        for series in found:
            value = float(series["value"][1])
            own = _overrides(panel, _name(legend, series["metric"]))
            name, number = own.get("displayName", _name(legend, series["metric"])), shown(value, defaults["unit"])
            lines.append({"name": name, "value_and_name": f"{name}  {number}"}.get(mode, number))
            reached = [step for step in defaults["thresholds"]["steps"] if value >= (step["value"] or -math.inf)]
            color = own.get("color", {}).get("fixedColor") or reached[-1]["color"]
            colors.append(_NAMED.get(color, color))
    for place, color in enumerate(colors[:_MAX_LINES]):  # as Grafana, which divides the panel among its values
        height = 1 / len(colors[:_MAX_LINES])
        axes.axhspan(1 - (place + 1) * height, 1 - place * height, color=color)
    axes.set_ylim(0, 1)
    text = "\n".join(lines[:_MAX_LINES]) or defaults.get("noValue", "No data")
    axes.set_facecolor("#bbbbbb")
    size = 13 if len(lines) < 2 else 8
    axes.text(0.5, 0.5, text, ha="center", va="center", color="white", fontsize=size, transform=axes.transAxes)


def _series(axes: Axes, panel: dict[str, Any], store: Store) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom, stack = defaults["custom"], [0.0] * (int(store.ends - BEGAN) // STEP_SECONDS + 1)
    is_bars, is_stacked = custom["drawStyle"] == "bars", custom.get("stacking", {}).get("mode") == "normal"
    for number, target in enumerate(panel["targets"]):
        over = _overrides(panel, target["refId"])
        for series in store.range(filled_in(target["expr"])):
            name = _name(target["legendFormat"], series["metric"])
            own = _overrides(panel, name)
            color = own.get("color", over.get("color", {})).get("fixedColor")
            color, name = _NAMED.get(color, color), own.get("displayName", name)
            values = [math.nan] * len(stack)
            for at, value in series["values"]:
                values[int(at - BEGAN) // STEP_SECONDS] = float(value)
            minutes = [place * STEP_SECONDS / 60 for place in range(len(values))]
            if over.get("custom.stacking", {}).get("mode") == "none" or not (is_stacked or is_bars):
                axes.plot(
                    minutes, values, label=name, color=color, linewidth=1.1, linestyle="--" if number and over else "-"
                )
                continue
            higher = [low + (0 if math.isnan(value) else value) for low, value in zip(stack, values, strict=True)]
            if is_bars:
                heights = [high - low for low, high in zip(stack, higher, strict=True)]
                axes.bar(minutes, heights, bottom=stack, width=STEP_SECONDS / 60, label=name, color=color)
            else:
                axes.fill_between(minutes, stack, higher, label=name, color=color, alpha=0.65, linewidth=0)
            stack = higher
    _dress(axes, defaults)


def _overrides(panel: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        each["id"]: each["value"]
        for over in panel["fieldConfig"]["overrides"]
        if over["matcher"]["options"] == name
        for each in over["properties"]
    }


def _dress(axes: Axes, defaults: dict[str, Any]) -> None:
    _time_axis(axes)
    axes.grid(visible=True, linewidth=0.3)
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, defaults["unit"]))
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[:_MAX_LEGEND], labels[:_MAX_LEGEND], fontsize=5.5, loc="upper left", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, defaults.get("noValue", "No data"), ha="center", transform=axes.transAxes)


def _time_axis(axes: Axes) -> None:
    axes.set_xlim(0, 120)
    ticks = range(0, 121, 20)
    axes.set_xticks(ticks, [datetime.fromtimestamp(BEGAN + 60 * minute, UTC).strftime("%H:%M") for minute in ticks])


def _states(axes: Axes, panel: dict[str, Any], store: Store) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    rows = [(_name(legend, series["metric"]), series) for legend, found in answers(panel, store) for series in found]
    rows = [(name.strip(), series) for name, series in sorted(rows, key=lambda each: each[0])][:_MAX_ROWS]
    told: set[str] = set()
    for place, (_, series) in enumerate(rows):
        for at, value in series["values"]:
            result = mapping["options"].get(f"{float(value):.0f}")
            if result is None:
                continue
            color = _NAMED.get(result["color"], result["color"])
            left, label = (at - BEGAN) / 60, result["text"]
            axes.barh(
                place, STEP_SECONDS / 60, left=left, color=color, height=0.8, label="" if label in told else label
            )
            told.add(label)
    _time_axis(axes)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", direction="in", pad=-4)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.invert_yaxis()
    if told:
        axes.legend(fontsize=5.5, loc="lower right", framealpha=0.7, ncols=5)


def _table(axes: Axes, panel: dict[str, Any], store: Store) -> None:
    axes.axis("off")
    organize = panel["transformations"][-1]["options"]
    units = {over["matcher"]["options"]: _overrides(panel, over["matcher"]["options"]).get("unit", "none")
             for over in panel["fieldConfig"]["overrides"]}  # fmt: skip
    found: dict[tuple[str, ...], dict[str, str]] = {}
    brought = [series for _, series in answers(panel, store)]
    common = (
        set.intersection(*(set(each["metric"]) for series in brought for each in series)) if any(brought) else set()
    )
    for place, series in enumerate(brought):
        column = f"Value #{chr(ord('A') + place)}"
        unit = units.get(organize["renameByName"].get(column), "none")
        for each in series:  # as the transformation `merge` joins them: by the labels that all have
            cells = found.setdefault(tuple(each["metric"][label] for label in sorted(common)), {})
            cells.update({name: value for name, value in each["metric"].items() if name != "__name__"})
            value = float(each["value"][1])
            words = _overrides(panel, organize["renameByName"].get(column, "")).get("mappings", [{"options": {}}])
            cells[column] = words[0]["options"].get(f"{value:.0f}", {}).get("text", shown(value, unit))
    columns = sorted(organize["indexByName"], key=organize["indexByName"].__getitem__)
    text = [[cells.get(column, "") for column in columns] for _, cells in sorted(found.items())]
    heads = [organize["renameByName"].get(column, column) for column in columns]
    table = axes.table(cellText=text or [[""] * len(columns)], colLabels=heads, loc="upper center", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.6)
    table.auto_set_column_width(list(range(len(columns))))


_KINDS: Final[dict[str, Callable[[Axes, dict[str, Any], Store], None]]] = {
    "stat": _stat,
    "timeseries": _series,
    "state-timeline": _states,
    "table": _table,
}
