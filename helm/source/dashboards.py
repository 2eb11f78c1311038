"""The Grafana dashboards: each from its YAML, with variables, resets as annotations, and rows of panels in one style.

A panel is Grafana's own JSON: `grafana.yaml` has the constant part of each kind, and a function here what follows from
the options that a YAML gives. Each has a unit, and a description that ends in the HELP texts of the families it reads.

Names and HELP texts come from the golden exposition, which a unit test compares with `app/highwater/http/metrics.py`: a
metric that is renamed there is unknown here, and no dashboard is generated.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from highwater.model.components import COMPONENTS

GRID_WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Plan: TypeAlias = dict[str, Any]  # a dashboard, a variable or a panel as YAML holds it
Json: TypeAlias = dict[str, Any]
Steps: TypeAlias = Mapping[float, str]
"""Colours, each from its value on; the first is that of everything under the second."""

GRAFANA: Json = yaml.safe_load((Path(__file__).parent / "grafana.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Query:
    """One query of a panel, in PromQL; ``legend`` is the name of its series.

    ``column``: of a table, `name`, `unit` and `steps` of the column of its values; without a name it is not shown.
    """

    expr: str
    legend: str = ""
    column: Mapping[str, Any] = field(default_factory=dict)


def described(text: str, queries: Sequence[Query]) -> str:
    """Return the panel's own sentence, and the meaning of each family that it reads. Raises UnknownMetricError."""
    families = dict.fromkeys(family for query in queries for family in names_in(query.expr))
    return "\n".join([text, "", *(f"- `{family}`: {help_of(family)}" for family in families)])


def panel(
    kind: str,
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str = "none",
    empty: str | None = None,
    width: int | None = None,
    height: int | None = None,
    **options: Any,
) -> Json:
    """Return a panel as Grafana keeps it, without its number and place.

    `kind` is `stat`, `series`, `states` or `table`, whose function below takes the `options`; `text` says what it shows
    to somebody who sees it for the first time. `unit` is Grafana's name, `empty` the text without data, `width` of 24,
    `height` in rows; None: that of the kind.
    """
    made = deepcopy(GRAFANA["kinds"][kind])
    made |= {"title": title, "description": described(text, queries), "datasource": DATASOURCE}
    is_instant = kind in {"stat", "table"}
    made["targets"] = [
        {
            "datasource": DATASOURCE,
            "expr": query.expr,
            "format": "table" if kind == "table" else "time_series",
            "instant": is_instant,
            "range": not is_instant,
            "legendFormat": query.legend or "__auto",
            "refId": letter,
        }
        for letter, query in zip(string.ascii_uppercase, queries, strict=False)
    ]
    made["gridPos"] |= {key: size for key, size in (("w", width), ("h", height)) if size is not None}
    made["fieldConfig"]["defaults"] |= {"unit": unit} | ({} if empty is None else {"noValue": empty})
    _KINDS[kind](made, queries, **options)
    return made


def _thresholds(steps: Steps) -> Json:
    values = [None, *list(steps)[1:]]
    colors = zip(values, steps.values(), strict=True)
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in colors]}


def _property(name: str, value: object) -> Json:
    return {"id": name, "value": value}


def _fixed(color: str) -> Json:
    return _property("color", {"mode": "fixed", "fixedColor": color})


def _words(value: str) -> str:
    """Return what people read for a state: the glossary's word."""
    return str(GRAFANA["state_words"].get(value, value.replace("_", " ")))


def _override(made: Json, matcher: str, name: str, *properties: Json) -> None:
    made["fieldConfig"]["overrides"].append(
        {"matcher": {"id": matcher, "options": name}, "properties": list(properties)}
    )


def _stat(
    made: Json, _: Sequence[Query], *, steps: Steps | None = None, names: str = "", colors: Mapping[str, str] = {}
) -> None:
    """Show one number, coloured by thresholds; or, with `names` (`name`, `value_and_name`), the series' names.

    `colors` are by legend, where no fixed threshold can be right.
    """
    made["fieldConfig"]["defaults"]["thresholds"] = _thresholds(steps or {0: "blue"})
    if names:
        made["options"]["textMode"] = names
        colors = GRAFANA["state_colors"]
    for name, color in colors.items():
        renamed = [_property("displayName", _words(name))] if _words(name) != name else []
        _override(made, "byName", name, _fixed(color), *renamed)


def _series(
    made: Json,
    queries: Sequence[Query],
    *,
    stacked: bool = False,
    bars: bool = False,
    lines: Mapping[str, str] = {},
    steps: Steps | None = None,
    at_least: float | None = 0,
    at_most: float | None = None,
    repeat: str | None = None,
) -> None:
    """Draw series over time.

    `lines` are legends drawn as a line of a colour over a stack, `steps` dashed lines at values, `at_least` and
    `at_most` the ends of the axis, and `repeat` a variable of which every value has a panel of its own.
    """
    defaults = made["fieldConfig"]["defaults"]
    if stacked:
        defaults["custom"]["fillOpacity"] = 60
    if bars:
        defaults["custom"] |= {"drawStyle": "bars", "fillOpacity": 80}
    if stacked or bars:
        defaults["custom"]["stacking"] = {"mode": "normal", "group": "A"}
    if steps is not None:
        defaults["thresholds"] = _thresholds(steps)
        defaults["custom"]["thresholdsStyle"] = {"mode": "dashed"}
    defaults |= {key: bound for key, bound in (("min", at_least), ("max", at_most)) if bound is not None}
    for component in COMPONENTS if stacked or bars else ():
        _override(made, "byName", component.label, _fixed(component.grafana), _property("displayName", component.title))
    for letter, query in zip(string.ascii_uppercase, queries, strict=False):
        if query.legend in lines:
            styles = [_property(f"custom.{name}", value) for name, value in GRAFANA["line_over_stack"].items()]
            _override(made, "byFrameRefID", letter, _fixed(lines[query.legend]), *styles)
    if repeat is not None:
        made |= {"repeat": repeat, "maxPerRow": 4}


def _states(made: Json, _: Sequence[Query], *, values: Sequence[str], link: str | None = None) -> None:
    """Show which of `values` holds, over time: a row for each series, which is the number, from 1 on, of that value."""
    shown = {
        str(number): {"text": _words(value), "color": GRAFANA["state_colors"][value], "index": number}
        for number, value in enumerate(values, 1)
    }
    made["fieldConfig"]["defaults"]["mappings"] = [{"type": "value", "options": shown}]
    if link is not None:
        made["fieldConfig"]["defaults"]["links"] = [GRAFANA["link"] | {"url": link}]


def _table(
    made: Json, queries: Sequence[Query], *, labels: Sequence[str], links: Mapping[str, str] = {}, sort_by: str
) -> None:
    """Show one row for each set of labels, one column for each query; `labels` are the columns before those."""
    sources = [f"Value #{letter}" for letter in string.ascii_uppercase[: len(queries)]]
    columns = {source: query.column for source, query in zip(sources, queries, strict=True)}
    named = {source: column["name"] for source, column in columns.items() if "name" in column}
    organize = {
        "excludeByName": {"Time": True, **{source: True for source in sources if source not in named}},
        "indexByName": {name: number for number, name in enumerate((*labels, *named))},
        "renameByName": named,
    }
    made["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}]
    by_name = {column["name"]: column for column in columns.values() if "name" in column}
    for name in sorted({*(name for name, column in by_name.items() if len(column) > 1), *links}):
        column = by_name.get(name, {})
        properties = [_property("unit", column["unit"])] if "unit" in column else []
        if "steps" in column:
            properties.append(_property("thresholds", _thresholds(column["steps"])))
            properties.append(_property("custom.cellOptions", {"type": "color-background", "mode": "basic"}))
        if "words" in column:
            words = {str(value): {"text": word, "index": value} for value, word in column["words"].items()}
            properties.append(_property("mappings", [{"type": "value", "options": words}]))
        if name in links:
            properties.append(_property("links", [{"title": "Open this server", "url": links[name]}]))
        _override(made, "byName", name, *properties)
    made["options"]["sortBy"] = [{"displayName": sort_by, "desc": True}]


_KINDS: Mapping[str, Callable[..., None]] = {"stat": _stat, "series": _series, "states": _states, "table": _table}


# --- a dashboard ---


def dashboard(path: Path) -> str:
    """Return the dashboard of a YAML file as Grafana loads it: JSON, every panel numbered in its order."""
    plan: Plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    names: Mapping[str, str] = plan["names"]
    variables = [GRAFANA["datasource"]]
    for each in plan["variables"]:  # its values are those of a label of its name; one that no target has stays at All
        name, of = each["name"], filled_in(each["of"], names)
        names_in(of)
        own = {
            "name": name,
            "label": each["label"],
            "description": each["text"],
            "datasource": DATASOURCE,
            "query": {"query": f"label_values({of}, {name})", "refId": f"variable-{name}"},
        }
        variables.append(GRAFANA["variable_with_all" if each.get("multi", True) else "variable"] | own)
    annotations = []
    for each in plan["annotations"]:  # marks at every reset that a selector finds
        selector = filled_in(each["of"], names)
        resets = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}})"
        before = f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{selector}}} offset $__interval)"
        # A reset's series begins with its first reset: `increase` would never see that one.
        expr = f"(({resets}) - ({before}) > 0) or (({resets}) unless ({before}))"
        names_in(expr)
        own = {"name": each["name"], "datasource": DATASOURCE, "iconColor": each["color"], "expr": expr}
        annotations.append(GRAFANA["reset"] | own)
    numbers, panels, top = itertools.count(1), [], 0
    for place, section in enumerate(plan["rows"]):
        row = {"type": "row", "title": section["row"], "id": next(numbers), "collapsed": False, "panels": []}
        row["gridPos"] = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top}
        below = [_panel(each, names) | {"id": next(numbers)} for each in section["panels"]]
        left, top, tallest = 0, top + 1, 0
        for each in below:  # from the left, line by line
            each["gridPos"] |= {"x": left, "y": top}
            left, tallest = left + each["gridPos"]["w"], max(tallest, each["gridPos"]["h"])
            if left >= GRID_WIDTH:
                left, top, tallest = 0, top + tallest, 0
        top += tallest
        is_open = place == 0 or section.get("open", False)
        # The queries of the others are not sent until somebody opens the row.
        panels += [row, *below] if is_open else [row | {"collapsed": True, "panels": below}]
    board = GRAFANA["board"] | {
        "title": plan["title"],
        "uid": f"highwater-{path.stem}",
        "description": plan["text"],
        "templating": {"list": [*variables, GRAFANA["runbooks"]]},
        "annotations": {"list": annotations},
        "panels": panels,
    }
    return json.dumps(board, indent=2, sort_keys=True) + "\n"


def filled_in(expr: str, names: Mapping[str, str]) -> str:
    """Return a query with its names, words in capitals, replaced by their meaning, which may hold names too."""
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    while word.search(expr):
        expr = word.sub(lambda found: names[found[0]], expr)
    return expr


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
            # The number, counted on from query to query, of the value of a label for which a family is 1 now.
            family, label, by = coded["family"], coded["label"], coded.get("by", "")
            numbered = enumerate(coded["values"], len(options["values"]) + 1)
            each_value = " or ".join(
                f'{number} * ({family}{{SERVER, {label}="{value}"}} == 1)' for number, value in numbered
            )
            queries.append(Query(filled_in(f"max by ({by}) ({each_value})", names), legend))
            options["values"] += coded["values"]
    return panel(kind, options.pop(kind), options.pop("text"), queries, **options)


# --- the metrics that exist ---

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "unit" / "http" / "golden" / "metrics.txt"

# vLLM's own families, which are not there where Prometheus scrapes `/metrics?engine=0`. What they mean is vLLM's to say
# (vllm/v1/metrics/loggers.py); `tests/engine/test_sidecar.py` asks the real engine for each.
ENGINE_FAMILIES = {
    "vllm:num_requests_running": "Requests in the running batch, by engine.",
    "vllm:num_requests_waiting": "Requests queued in the scheduler, by engine.",
    "vllm:kv_cache_usage_perc": "Used share of the KV cache's blocks, 1 is all, by engine.",
    "vllm:prefix_cache_hits_total": "Tokens found in the prefix cache.",
    "vllm:prefix_cache_queries_total": "Tokens looked up in the prefix cache.",
    "vllm:mm_cache_hits_total": "Items found in the multimodal processor cache.",
    "vllm:mm_cache_queries_total": "Items looked up in the multimodal processor cache.",
    "vllm:num_preemptions_total": "Requests that lost their KV blocks and were computed again.",
    "vllm:generation_tokens_total": "Tokens generated.",
    "vllm:prompt_tokens_total": "Prompt tokens computed.",
}
ENGINE_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Time to the first token of a request, in seconds.",
    "vllm:inter_token_latency_seconds": "Time between two tokens of a request, in seconds.",
    "vllm:e2e_request_latency_seconds": "Time from a request's arrival to its last token, in seconds.",
}
# Prometheus' own.
PROMETHEUS_FAMILIES = {
    "up": "1 where the last scrape of the target went well.",
    "ALERTS": "1 while an alert of the rules that are loaded is pending or firing.",
}

_NAME = re.compile(r"\b(?:highwater_\w+|vllm:\w+)|\b(?:up|ALERTS)\b")


class UnknownMetricError(LookupError):
    """A query names a metric that is not exported."""


_TEXT = GOLDEN.read_text(encoding="utf-8")
_TYPES = dict(re.findall(r"^# TYPE (\S+) (\S+)$", _TEXT, re.MULTILINE))
OWN = {name: (_TYPES[name], meaning) for name, meaning in re.findall(r"^# HELP (\S+) (.+)$", _TEXT, re.MULTILINE)}


def names_in(expression: str) -> list[str]:
    """Return the families that a PromQL expression reads, in its order, each once. Raises UnknownMetricError."""
    without_text = re.sub(r'"[^"]*"', '""', expression)
    families = {}
    for name in _NAME.findall(without_text):
        family = name
        if name not in OWN and name not in ENGINE_FAMILIES and name not in PROMETHEUS_FAMILIES:
            family = re.sub(r"_(?:bucket|count|sum)$", "", name)
            is_ours = OWN.get(family, ("", ""))[0] == "histogram"
            if not is_ours and (family == name or family not in ENGINE_HISTOGRAMS):
                raise UnknownMetricError(f"{name} is neither in {GOLDEN.name} nor one of the engine's families")
        families[family] = None
    return list(families)


def help_of(family: str) -> str:
    if family in OWN:
        return OWN[family][1]
    return (ENGINE_FAMILIES | ENGINE_HISTOGRAMS | PROMETHEUS_FAMILIES)[family]
