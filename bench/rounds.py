"""The order of the slices in a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Name = TypeVar("Name")


def order(names: Sequence[Name], turn: int) -> list[Name]:
    """Return the names so that every round begins with another one, and every other round runs backwards."""
    start = turn % len(names)
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if turn % 2 else turned
