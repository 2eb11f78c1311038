"""The one error of planning: a request that cannot be planned, and why."""

from __future__ import annotations

from typing import Final

_MAX_ECHO: Final = 100


class PlanError(Exception):
    """A plan cannot be made: the message names the key, the value and what would be right."""


def short(value: object) -> str:
    """Return a value as an error shows it: a long one is cut, whoever sent it."""
    text = repr(value)
    return text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}..."
