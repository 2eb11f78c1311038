"""values.schema.json: the types of `values.yaml` beside this file as JSON Schema, and `config` from the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from helm.generator.settings import config_schema

Schema = dict[str, Any]

_PLAN: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "values.yaml").read_text(encoding="utf-8"))
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
    table["properties"]["config"] = _config()
    table["properties"]["global"] = {"type": "object", "properties": {"imageRegistry": _named("REGISTRY")}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Highwater",
        "description": "Made by `python -m helm.generator`; `config` follows app/highwater/settings/.",
        **table,
        "allOf": [
            {
                "if": {"properties": {section: {"properties": {"enabled": {"const": True}}}}},
                "then": {"properties": {section: {"properties": {key: {"minItems": 1}}}}},
            }
            for section, key in _REQUIRED_IF_ENABLED.items()
        ],
    }


def _config() -> Schema:
    schema = config_schema()
    # Probes and Services need these: they must be set, and ports are above 1023 because no container runs as root.
    schema["properties"]["host"] = _named("NOT_EMPTY")
    for key in ("port", "control_port"):
        schema["properties"][key] = _named("OPEN_PORT") | {"description": schema["properties"][key]["description"]}
    return schema


def text() -> str:
    return json.dumps(values_schema(), indent=2) + "\n"
