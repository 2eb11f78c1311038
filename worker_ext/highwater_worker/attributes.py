"""Reading values out of an engine of which any version may lack any attribute.

Absent becomes None; a property that raises still raises, for `Notes` to record.
"""

from __future__ import annotations

import math
from typing import Any


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
    """Return a finite number as a float, and None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def text(value: object) -> str | None:
    """Return a value's text (torch's version is a subclass of str), and None for None."""
    return None if value is None else str(value)
