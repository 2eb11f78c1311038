"""Text from outside without control characters and terminal sequences; on one line and cut to a length on request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

MAX_LENGTH = 500
MAX_DEPTH = 8

# Colours and cursor movements; what is left of any other escape is harmless once the escape character is gone.
_TERMINAL = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_Value = TypeVar("_Value")


def printable(text: str, *, instead: str = "", keep: str = "") -> str:
    """Return the text with each control character and half of a character replaced, except those to ``keep``."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else instead for letter in text)


def plain(text: str, most: int = MAX_LENGTH) -> str:
    """Return the text as one line of printable characters, cut to ``most`` characters."""
    # Four times as much is read: enough to fill the line, and a bound to the work.
    shown = printable(_TERMINAL.sub("", text[: most * 4]), instead=" ").strip()
    return shown if len(shown) <= most and len(text) <= most * 4 else shown[: most - 1] + "…"


def cleaned(value: _Value, depth: int = MAX_DEPTH, *, most: int = MAX_LENGTH) -> _Value:
    """Return the value with every text in it plain, cut to ``most`` characters: dataclasses, mappings, sequences."""
    result: Any = value
    if isinstance(value, str):
        result = plain(value, most)
    elif depth == 0 or value is None or isinstance(value, int | float):
        return value
    elif is_dataclass(value) and not isinstance(value, type):
        result = replace(
            value, **{part.name: cleaned(getattr(value, part.name), depth - 1, most=most) for part in fields(value)}
        )
    elif isinstance(value, Mapping):
        result = {
            cleaned(key, depth - 1, most=most): cleaned(item, depth - 1, most=most) for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        result = tuple(cleaned(item, depth - 1, most=most) for item in value)
    cleaned_value: _Value = result
    return cleaned_value


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
