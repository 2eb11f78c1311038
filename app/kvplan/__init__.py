"""A KV cache by vLLM's rules: groups of layers, pool, tokens, concurrency, longest length; a package of its own.

Here are the words of all its modules: the one error, and a size in bytes with how well it is known.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

# How a figure is known, best first: the engine's own number, a formula of vLLM's, a value that was measured, an
# estimate between bounds.
Grade: TypeAlias = Literal["engine", "exact", "measured", "estimated"]
GRADES: Final[tuple[Grade, ...]] = ("engine", "exact", "measured", "estimated")
MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
_MAX_ECHO: Final = 100


class PlanError(Exception):
    """A plan cannot be made: the message names the key, the value and what would be right."""


def short(value: object) -> str:
    """Return a value as an error shows it: a long one is cut, whoever sent it."""
    text = repr(value)
    return text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}..."


class Figure(NamedTuple):
    """One part of a memory budget: its likely size in bytes, and bounds, which differ in an estimate alone."""

    bytes: int
    low: int
    high: int
    grade: Grade
    why: str  # where the figure comes from, in one sentence


def estimated(low: int, likely: int, high: int, why: str) -> Figure:
    return Figure(likely, min(low, likely), max(high, likely), "estimated", why)


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)
