"""Sizes in bytes, and how well they are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

# How a figure is known, best first: the engine's own number, a formula of vLLM's, a value that was measured, an
# estimate between bounds.
Grade: TypeAlias = Literal["engine", "exact", "measured", "estimated"]
GRADES: Final[tuple[Grade, ...]] = ("engine", "exact", "measured", "estimated")
KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


class Figure(NamedTuple):
    """One part of a memory budget: its likely size in bytes, and bounds, which differ in an estimate alone."""

    bytes: int
    low: int
    high: int
    grade: Grade
    why: str  # where the figure comes from, in one sentence


def measured(size: int, why: str) -> Figure:
    return Figure(size, size, size, "measured", why)


def estimated(low: int, likely: int, high: int, why: str) -> Figure:
    return Figure(likely, min(low, likely), max(high, likely), "estimated", why)


def add(parts: Iterable[Figure], why: str) -> Figure:
    """Add figures: the sum is known as well as the worst known of them."""
    parts = tuple(parts)
    grades = {part.grade for part in parts}
    grade: Grade = next((grade for grade in reversed(GRADES) if grade in grades), "exact")
    return Figure(
        sum(part.bytes for part in parts),
        sum(part.low for part in parts),
        sum(part.high for part in parts),
        grade,
        why,
    )


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)
