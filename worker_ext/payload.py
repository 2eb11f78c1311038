"""The arguments of an operation: one JSON object, checked key by key.

Nothing is ignored and nothing is converted: a wrong key or value is refused, naming key, value and what would be right.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from worker_ext.errors import BadPayloadError, describe, printable

if TYPE_CHECKING:
    from collections.abc import Mapping


class Field(Protocol):
    """One key of a payload."""

    @property
    def default(self) -> object:
        """The value where the key is absent."""

    @property
    def right(self) -> str:
        """What a value must be, in words."""

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""


@dataclass(frozen=True)
class IntegerField:
    """A whole number in a closed range."""

    default: int
    minimum: int
    maximum: int

    @property
    def right(self) -> str:
        """What a value must be, in words."""
        return f"an integer from {self.minimum} to {self.maximum}"

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        # JSON's true is a bool, and Python's bool is an int.
        return isinstance(value, int) and not isinstance(value, bool) and self.minimum <= value <= self.maximum


@dataclass(frozen=True)
class OptionalIntegerField:
    """A whole number from a minimum on, or null, which means the same as no key."""

    minimum: int
    default: None = None

    @property
    def right(self) -> str:
        """What a value must be, in words."""
        return f"an integer from {self.minimum} on, or null"

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= self.minimum)


@dataclass(frozen=True)
class OptionalNumberField:
    """A finite number from a minimum on, or null, which means the same as no key."""

    minimum: float
    default: None = None

    @property
    def right(self) -> str:
        """What a value must be, in words."""
        return f"a number from {self.minimum:g} on, or null"

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        if value is None:
            return True
        # Integers may be beyond what a float can hold; NaN and Infinity pass Python's JSON parser.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and value >= self.minimum and value != math.inf  # type: ignore[operator]


@dataclass(frozen=True)
class NumberField:
    """A number in a closed range."""

    default: float
    minimum: float
    maximum: float

    @property
    def right(self) -> str:
        """What a value must be, in words."""
        return f"a number from {self.minimum:g} to {self.maximum:g}"

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and self.minimum <= value <= self.maximum  # type: ignore[operator]


@dataclass(frozen=True)
class TextField:
    """Text of a form; it must be given."""

    pattern: str
    """A regular expression that the whole of it must match."""
    right: str
    """What a value must be, in words."""
    default: None = None

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class OptionalTextField(TextField):
    """Text of a form, or null, which means the same as no key."""

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        return value is None or super().accepts(value)


@dataclass(frozen=True)
class BooleanField:
    """True or false."""

    default: bool
    right: str = "true or false"

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        return isinstance(value, bool)


@dataclass(frozen=True)
class ChoiceField:
    """One of a few words."""

    default: str
    choices: tuple[str, ...]

    @property
    def right(self) -> str:
        """What a value must be, in words."""
        return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)

    def accepts(self, value: object) -> bool:
        """Say whether the value may be used as it is."""
        return isinstance(value, str) and value in self.choices


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
        # A field that does not accept its own default has none.
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
