"""Lists of what an answer rests on beside vLLM's own code; each line once."""

from __future__ import annotations

PRETENDED: list[str] = []
NOT_COUNTED: list[str] = []
"""Memory that a start takes and no figure here has."""
GUESSED: list[str] = []
LOG: list[str] = []
"""Warnings of vLLM."""


def say(where: list[str], text: str) -> None:
    if text not in where:
        where.append(text)
