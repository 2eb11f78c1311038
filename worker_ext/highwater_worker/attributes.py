"""Reads values out of an engine of which any version may lack any attribute.

Absent becomes None; a property that raises still raises, for `Notes` to record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from highwater_worker.errors import printable


def look_up(root: object, *path: str) -> Any:  # noqa: ANN401 - vLLM has no types that hold for all versions
    """Return `root.a.b.c`, or None where anything on the way is missing or None."""
    value: Any = root
    for name in path:
        if value is None:
            return None
        value = getattr(value, name, None)
    return value


def whole(value: object) -> int | None:
    """Return a number as an int (bytes come as float from some versions), and None for everything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else None
    try:
        return int(value.__index__())  # type: ignore[attr-defined]  # numpy's integers have it, and it never rounds
    except (AttributeError, TypeError):
        return None


def fraction(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def text(value: object) -> str | None:
    """Return a value's text (torch's version is a subclass of str), and None for None."""
    return None if value is None else str(value)


def first_of(root: object, *paths: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:  # noqa: ANN401 - as above
    """Return the first value that converts to something, of dotted paths: versions have it in different places."""
    values = (convert(look_up(root, *path.split("."))) for path in paths)
    return next((value for value in values if value is not None), None)


def flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def short_text(value: object, limit: int) -> str | None:
    return None if value is None else printable(str(value), limit)
