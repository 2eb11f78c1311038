"""Checks of what another process wrote into a file: a value that is not as the contract has it counts as unknown."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from highwater.readings.schema import MAX_NUMBER
from highwater.text.printable import printable
from highwater.text.strict_json import parse_json

_MAX_TEXT = 200


class RingUnusable(Exception):
    """A recorder file that cannot be used.

    ``reason`` begins with one of: truncated, foreign, version, corrupt header, corrupt identity, not a regular file,
    too large, unreadable.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def json_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(str(text, "ascii"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def is_within_bounds(value: object) -> bool:
    """Return whether every number in a value of ``readings`` can be counted with: finite, not negative, of 63 bits."""
    if isinstance(value, int | float):
        return 0 <= value <= MAX_NUMBER
    parts = fields(value) if is_dataclass(value) else ()
    return all(is_within_bounds(getattr(value, part.name)) for part in parts)


def count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_NUMBER else None


def number(value: object) -> float | None:
    """Return a finite number that is not negative. JSON's true is a Python integer, and no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_NUMBER else None


def short_text(value: object) -> str | None:
    """Return text that a terminal and UTF-8 can take: JSON may hold control characters and halves of characters."""
    return printable(value[:_MAX_TEXT], instead="?") if isinstance(value, str) else None
