"""JSON from outside: parsed as the standard has it, without ``NaN`` and ``Infinity``, and read without trust."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value. Raises ValueError where it is not JSON, or nested too deeply for the parser."""
    try:
        return _DECODER.decode(text)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = whole.get(name)
    return value if isinstance(value, dict) else {}


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
