"""How two readings of a rank differ, part by part; ``None`` where a figure is not known. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from highwater.accounting.components import COMPONENT_NAMES
from highwater.readings.rank import RankReading

_Item = TypeVar("_Item")
_Size = TypeVar("_Size", int, float)


def part_of(reading: RankReading, name: str) -> int | None:
    held: int | None = getattr(reading.components if name in COMPONENT_NAMES else reading, name)
    return held


def risen(first: RankReading | None, now: RankReading, read: Callable[[RankReading], int | None]) -> int | None:
    was, is_now = None if first is None else read(first), read(now)
    return None if was is None or is_now is None else is_now - was


def change(first: RankReading | None, now: RankReading | None, part: str) -> int | None:
    """``None`` of another process too."""
    if first is None or now is None or first.pid != now.pid:
        return None
    return risen(first, now, lambda reading: part_of(reading, part))


def total(sizes: Iterable[int | None]) -> int | None:
    """``None`` where one is not known, or there is none."""
    listed = list(sizes)
    known = [each for each in listed if each is not None]
    return sum(known) if listed and len(known) == len(listed) else None


def highest(items: Iterable[_Item], read: Callable[[_Item], _Size | None]) -> tuple[_Size, _Item] | None:
    known = [(size, item) for item in items if (size := read(item)) is not None]
    return max(known, key=lambda each: each[0], default=None)
