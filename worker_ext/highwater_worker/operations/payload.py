"""The arguments of an operation: one JSON object, checked key by key.

Nothing is ignored and nothing is converted: a wrong key or value is refused, naming key, value and what would be right.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater_worker.errors import BadPayloadError, describe, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Field(NamedTuple):
    """One key of a payload."""

    default: object
    """The value where the key is absent; a key whose default is not accepted is required."""
    right: str
    """A description of the values that are accepted."""
    accepts: Callable[[object], bool]
    """Returns whether a value may be used as it is."""

    def or_null(self) -> Field:
        """Return this field with null accepted, which means the same as no key."""
        return Field(None, f"{self.right}, or null", lambda value: value is None or self.accepts(value))


def integer(minimum: int, maximum: int | None = None, *, default: int | None = None) -> Field:
    """Return a field for whole numbers in a closed range; without a maximum there is no upper end."""
    # JSON's true is a bool, and Python's bool is an int.
    return Field(
        default,
        f"an integer from {minimum} {_end(maximum)}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and _is_within(value, minimum, maximum),
    )


def number(minimum: float, maximum: float | None = None, *, default: float | None = None) -> Field:
    """Return a field for finite numbers in a closed range; without a maximum there is no upper end."""
    return Field(
        default,
        f"a number from {minimum:g} {_end(maximum)}",
        lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and _is_within(value, minimum, maximum)
        ),
    )


def text(pattern: str, right: str) -> Field:
    """Return a field for text that a regular expression matches as a whole; it is required."""
    return Field(None, right, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def boolean(*, default: bool) -> Field:
    """Return a field for true or false."""
    return Field(default, "true or false", lambda value: isinstance(value, bool))


def choice(*choices: str) -> Field:
    """Return a field for one of a few words; the first is the default."""
    right = "one of " + ", ".join(f'"{word}"' for word in choices)
    return Field(choices[0], right, lambda value: isinstance(value, str) and value in choices)


def _end(maximum: float | None) -> str:
    return "on" if maximum is None else f"to {maximum:g}"


def _is_within(value: float, minimum: float, maximum: float | None) -> bool:
    # Integers may be beyond what a float can hold; NaN and Infinity pass Python's JSON parser.
    return minimum <= value and (value != math.inf if maximum is None else value <= maximum)


def parse_payload(payload: object, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the arguments for every field, defaults included.

    Raises:
        BadPayloadError: The payload is not a JSON object, or a key or value of it is wrong.
    """
    given = _json_object(payload)
    known = ", ".join(fields) or "none"
    for key, value in given.items():
        if key not in fields:
            raise BadPayloadError(f"payload key {_shown(key)} is unknown; known keys: {known}")
        if not fields[key].accepts(value):
            raise BadPayloadError(f"payload key {_shown(key)} is {_shown(value)}; it must be {fields[key].right}")
    for key, field in fields.items():
        if key not in given and not field.accepts(field.default):
            raise BadPayloadError(f"payload key {_shown(key)} is missing; it must be {field.right}")
    return {key: given.get(key, field.default) for key, field in fields.items()}


def _json_object(payload: object) -> dict[str, Any]:
    if not isinstance(payload, str):
        raise BadPayloadError(f"payload is of type {type(payload).__name__}; it must be the text of one JSON object")
    try:
        given = json.loads(payload)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deep for the parser
        raise BadPayloadError(
            f"payload {_shown(payload)} is not JSON ({describe(error)}); it must be the text of one JSON object"
        ) from error
    if not isinstance(given, dict):
        raise BadPayloadError(f"payload is {_shown(given)}; it must be one JSON object")
    return given


def _shown(value: object) -> str:
    return printable(repr(value), 80)
