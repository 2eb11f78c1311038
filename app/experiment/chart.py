"""A timeline as SVG, drawn by pygal: no script, no style of its own; the page's style gives each class its colour.

A report outlives the server that it is about and is opened where scripts are forbidden (a build's artefacts, a preview
of an attachment): hence a drawing, and nothing that must run.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, Final
from xml.etree import ElementTree as ET

import pygal  # type: ignore[import-untyped]  # it ships no types

from app.experiment.document import Timeline

# For plugins with maps pygal has itself asked at every import from then on, in a way that Python 3.11 warns about.
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, pygal.PluginImportFixer)]

WIDTH, HEIGHT = 960, 300
_COLOUR: Final = re.compile(r"\bcolor-(\d+)\b")
_NAMESPACE: Final = "{http://www.w3.org/2000/svg}"
# What would run or be fetched, what styles, and what pygal's own script would show on hovering.
_DROPPED: Final = {"defs", "script", "style", "desc", "foreignObject"}


def svg(timeline: Timeline) -> str:
    """The chart as an ``svg`` element; its colours are the classes ``c-COMPONENT``."""
    kind: Any = pygal.StackedLine if timeline.stacked else pygal.Line
    labels = [f"bin {index}" for index in range(len(timeline.lines[0].values))] if timeline.lines else []
    for tick in timeline.ticks:
        labels[tick.index] = tick.label
    chart = kind(
        width=WIDTH,
        height=HEIGHT,
        fill=timeline.stacked,
        show_dots=False,
        show_legend=False,
        show_x_guides=True,
        show_minor_x_labels=False,
        js=[],
        margin=6,
        truncate_label=-1,
        allow_interruptions=True,
        y_labels=_scale(timeline),
    )
    chart.x_labels = labels
    chart.x_labels_major = [tick.label for tick in timeline.ticks]
    for line in timeline.lines:
        chart.add(line.name, list(line.values))
    # As text: pygal's own tree is another library's where lxml is installed.
    root = ET.fromstring(chart.render(is_unicode=True))  # noqa: S314 - made here, a line above
    _clean(root, [line.component for line in timeline.lines])
    _raise_guides(root)
    root.attrib.clear()
    root.attrib |= {"class": "chart", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": _told(timeline)}
    return ET.tostring(root, encoding="unicode").replace("ns0:", "").replace("xmlns:ns0", "xmlns")


def _told(timeline: Timeline) -> str:
    shown = ", ".join(
        f"{line.name} {min(known):,.0f} to {max(known):,.0f}"
        for line in timeline.lines
        if (known := [value for value in line.values if value is not None])
    )
    return f"{timeline.caption}, MiB: {shown}"


def _scale(timeline: Timeline) -> list[dict[str, Any]]:
    """Round numbers in MiB from the lowest to the highest, and the top by its name."""
    known = [[value for value in line.values if value is not None] for line in timeline.lines]
    if timeline.stacked:
        sums = [
            sum(value or 0 for value in values)
            for values in zip(*(line.values for line in timeline.lines), strict=True)
        ]
        low, high = 0.0, max(sums, default=1.0)
    else:
        low, high = min((min(v) for v in known if v), default=0.0), max((max(v) for v in known if v), default=1.0)
        low, high = min(low, 0.0), max(high, 0.0)
    if timeline.top is not None:
        high = max(high, timeline.top[0])
    step = _round_step((high - low) / 5 or 1.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    labels: list[dict[str, Any]] = [
        {"value": number * step, "label": f"{number * step:,.0f}"} for number in range(first, last + 1)
    ]
    if timeline.top is None:
        return labels
    top, name = timeline.top
    # A round number just below the top would be written over.
    kept = [label for label in labels if label["value"] < top - 0.3 * step]
    return [*kept, {"value": top, "label": f"{name} {top:,.0f}"}]


def _round_step(rough: float) -> float:
    magnitude: float = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough)
    return max(step, 1.0)


def _raise_guides(root: ET.Element) -> None:
    """The moments' lines are drawn last: areas would cover them."""
    for parent in root.iter():
        for child in list(parent):
            if child.attrib.get("class", "").startswith("axis x"):
                parent.remove(child)
                parent.append(child)


def _clean(element: ET.Element, components: list[str]) -> None:
    for child in list(element):
        name = child.tag.removeprefix(_NAMESPACE) if isinstance(child.tag, str) else "comment"
        if name in _DROPPED or name == "title" or not isinstance(child.tag, str):
            element.remove(child)
        else:
            _clean(child, components)
    element.attrib.pop("style", None)
    element.attrib.pop("id", None)
    classes = element.attrib.get("class")
    if classes:
        element.attrib["class"] = _COLOUR.sub(lambda found: f"c-{components[int(found[1])]}", classes)
