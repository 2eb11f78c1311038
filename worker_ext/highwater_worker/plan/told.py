"""Lists of what an answer rests on beside vLLM's own code; each line once."""

from __future__ import annotations

from typing import Any

PRETENDED: list[str] = []
NOT_COUNTED: list[str] = []
"""Memory that a start takes and no figure here has."""
GUESSED: list[str] = []
LOG: list[str] = []
"""Warnings of vLLM."""


def say(where: list[str], text: str) -> None:
    if text not in where:
        where.append(text)


class LogReader:
    """Replaces the logger of a vLLM module, and keeps each line with its values."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def log(text: object, *values: Any, **_options: Any) -> None:
            self.lines.append((str(text), values))
            if name.startswith(("warning", "error")):
                say(LOG, str(text) % values if values else str(text))

        return log
