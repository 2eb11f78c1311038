"""The schema of `config`, from `highwater.settings`: Helm refuses an unknown setting before the sidecar does."""

from __future__ import annotations

from typing import Any

from highwater.policy.rules import ALL_REMEDIES, FALLING_SIGNALS, RATIO_SIGNALS, SIGNAL_REMEDIES
from highwater.settings.settings import Settings

CHARTS_OWN = frozenset({"engine_url", "admin_token", "tls", "engine_tls"})
"""The settings that the chart sets from other values: where the engine listens, and Secrets."""
_OMITTED = ("title", "default", "writeOnly")


def config_schema() -> dict[str, Any]:
    """Return an object schema without references, every key optional, null for the default."""
    whole = Settings.model_json_schema()
    config = _table(whole, whole["$defs"], without=CHARTS_OWN)
    rule = config["properties"]["policy"]["properties"]["rules"]["items"]
    # Settings check these names in code; a key that a rule requires is never null.
    properties = rule["properties"]
    properties["signal"]["enum"] = [*SIGNAL_REMEDIES]
    properties["remedies"]["items"]["enum"] = [*ALL_REMEDIES]
    properties["remedies"]["uniqueItems"] = True
    for key in rule["required"]:
        properties[key]["type"] = "string"
    return config


def signals() -> dict[str, list[str]]:
    """Return the signals by kind: the templates compare two values of a rule, which a schema cannot."""
    return {
        "falling": sorted(FALLING_SIGNALS),
        "ratios": sorted(RATIO_SIGNALS),
        "withoutRemedies": sorted(signal for signal, remedies in SIGNAL_REMEDIES.items() if not remedies),
    }


def _table(
    schema: dict[str, Any], definitions: dict[str, Any], without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    properties = {
        key: _or_null(_plain(value, definitions)) for key, value in schema["properties"].items() if key not in without
    }
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


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    # Helm removes a key that is overridden with null; a key that is null otherwise is left to its default too.
    nullable = dict(schema)
    if isinstance(nullable.get("type"), str):
        nullable["type"] = [nullable["type"], "null"]
    if "enum" in nullable:
        nullable["enum"] = [*nullable["enum"], None]
    return nullable
