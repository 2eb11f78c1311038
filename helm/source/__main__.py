"""Writes the dashboards, the alerts, and the chart's schema and signals: `python -m helm.source`.

By the schema Helm refuses an unknown setting before the sidecar does.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from helm.source.dashboards import dashboard
from highwater.act.rules import SIGNAL_REMEDIES
from highwater.model.policy import SIGNALS
from highwater.model.remedies import TRAITS
from highwater.server.settings import Settings

SOURCE = Path(__file__).resolve().parent
HELM = SOURCE.parent

# Prometheus has no variables in its rules, and every alert names its server, adds the model and gives a command in the
# same way: words in capitals, which are replaced, comments and all.
NAMES = {
    # Cluster, namespace and pod; the address that was scraped where there is no pod; and the model.
    "WHERE": (
        "{{ with $labels.cluster }}{{ . }}/{{ end }}{{ with $labels.namespace }}{{ . }}/{{ end }}"
        "{{ or $labels.pod $labels.instance }}{{ with $labels.model }} ({{ . }}){{ end }}"
    ),
    # Before a command of ours: where it runs.
    "RUN": (
        '{{ if $labels.pod }}kubectl -n {{ or $labels.namespace "NAMESPACE" }} exec {{ $labels.pod }} -c highwater -- '
        "{{ end }}"
    ),
    # The server's dashboard, for whose variables a scrape has labels.
    "BOARD": (
        "d/highwater-server?var-job={{ $labels.job }}&var-instance={{ $labels.instance }}"
        "{{ with $labels.cluster }}&var-cluster={{ . }}{{ end }}"
    ),
    "WITH_MODEL": "* on (cluster, job, instance) group_left (model) highwater_engine_info",
}


def alerts() -> str:
    text = (SOURCE / "alerts.yaml").read_text(encoding="utf-8")
    for name, meaning in NAMES.items():
        # What stands before a command ends in a blank of its own, where there is something.
        text = re.sub(rf"\b{name}\b ?" if name == "RUN" else rf"\b{name}\b", lambda _, meaning=meaning: meaning, text)
    return (
        "# Written by `python -m helm.source` from helm/source/alerts.yaml. Your own copy may be edited as it is.\n#\n"
        + text
    )


# --- the chart's schema: the types of values.yaml beside this file, and `config` from the settings ---

Schema = dict[str, Any]

_PLAN: dict[str, Any] = yaml.safe_load((SOURCE / "values.yaml").read_text(encoding="utf-8"))
# The settings that the chart sets from other values: where the engine listens, and Secrets.
CHARTS_OWN = frozenset({"engine_url", "admin_token", "tls", "engine_tls"})
_OMITTED = ("title", "default", "writeOnly")
# A section that is enabled must have at least one entry under this key.
_REQUIRED_IF_ENABLED = {"ingress": "hosts", "httpRoute": "parentRefs"}


def schema_of(plan: str | list[str] | dict[str, Any]) -> Schema:
    """Return the JSON Schema of a value in the notation of `values.yaml`."""
    if isinstance(plan, list):
        return {"type": "string", "enum": plan}
    if isinstance(plan, str):
        return _named(plan)
    if list(plan) == ["*"]:
        return {"type": "object", "additionalProperties": schema_of(plan["*"])}
    required = [key.removesuffix("!") for key in plan if key.endswith("!")]
    properties = {key.removesuffix("!"): schema_of(value) for key, value in plan.items()}
    table = {"type": "object", "additionalProperties": False, "properties": properties}
    return table | ({"required": required} if required else {})


def _named(name: str) -> Schema:
    if name.endswith("?"):
        return {"anyOf": [_named(name[:-1]), {"type": "null"}]}
    if name.endswith("[1]"):
        return {"type": "array", "minItems": 1, "items": _named(name[:-3])}
    if name.endswith("[]"):
        return {"type": "array", "items": _named(name[:-2])}
    return _PLAN["types"][name] if name in _PLAN["types"] else schema_of(_PLAN["objects"][name])


def values_schema() -> Schema:
    """Return the schema of all values; parent charts share `global` and may have keys of their own there."""
    table = schema_of(_PLAN["values"])
    table["properties"]["config"] = config = config_schema()
    # Probes and Services need these: they must be set, and ports are above 1023 because no container runs as root.
    config["properties"]["host"] = _named("NOT_EMPTY")
    for key in ("port", "control_port"):
        config["properties"][key] = _named("OPEN_PORT") | {"description": config["properties"][key]["description"]}
    table["properties"]["global"] = {"type": "object", "properties": {"imageRegistry": _named("REGISTRY")}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Highwater",
        "description": "Made by `python -m helm.source`; `config` follows app/highwater/server/settings/.",
        **table,
        "allOf": [
            {
                "if": {"properties": {section: {"properties": {"enabled": {"const": True}}}}},
                "then": {"properties": {section: {"properties": {key: {"minItems": 1}}}}},
            }
            for section, key in _REQUIRED_IF_ENABLED.items()
        ],
    }


def config_schema() -> dict[str, Any]:
    """Return an object schema without references, every key optional, null for the default."""
    settings = Settings.model_json_schema()
    config = _table(settings, settings["$defs"], without=CHARTS_OWN)
    rule = config["properties"]["policy"]["properties"]["rules"]["items"]
    # Settings check these names in code; a key that a rule requires is never null.
    properties = rule["properties"]
    properties["signal"]["enum"] = [*SIGNALS]
    properties["remedies"]["items"]["enum"] = [*TRAITS]
    properties["remedies"]["uniqueItems"] = True
    for key in rule["required"]:
        properties[key]["type"] = "string"
    return config


def signals() -> dict[str, list[str]]:
    """Return the signals by kind: the templates compare two values of a rule, which a schema cannot."""
    return {
        "falling": sorted(signal for signal, traits in SIGNALS.items() if traits.falls),
        "ratios": sorted(signal for signal, traits in SIGNALS.items() if traits.is_ratio),
        "withoutRemedies": sorted(signal for signal, remedies in SIGNAL_REMEDIES.items() if not remedies),
    }


def _table(
    schema: dict[str, Any], definitions: dict[str, Any], without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    properties = {}
    for key in (key for key in schema["properties"] if key not in without):
        value = _plain(schema["properties"][key], definitions)
        # Helm removes a key that is overridden with null; a key that is null otherwise is left to its default too.
        if isinstance(value.get("type"), str):
            value["type"] = [value["type"], "null"]
        if "enum" in value:
            value["enum"] = [*value["enum"], None]
        properties[key] = value
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without references, titles and defaults (values.yaml has them)."""
    if "$ref" in schema:
        return _plain(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "properties" in schema:
        table = _table(schema, definitions)
        return table | ({"required": schema["required"]} if "required" in schema else {})
    plain = {key: value for key, value in schema.items() if key not in _OMITTED}
    if "anyOf" in plain:  # a value or null: null is let through anyway
        (only,) = (_plain(part, definitions) for part in plain.pop("anyOf") if part != {"type": "null"})
        plain |= only
    if plain.pop("format", None) == "path":
        plain["pattern"] = "^/"
    if "items" in plain:
        plain["items"] = _plain(plain["items"], definitions)
    return plain


# --- all of them ---


def files() -> dict[str, str]:
    boards = {f"dashboards/highwater-{name}.json": dashboard(SOURCE / f"{name}.yaml") for name in ("server", "fleet")}
    return boards | {
        "alerts/highwater.rules.yaml": alerts(),
        "values.schema.json": json.dumps(values_schema(), indent=2) + "\n",
        "files/signals.json": json.dumps(signals(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HELM / name).write_text(text, encoding="utf-8")
