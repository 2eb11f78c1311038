"""Files that a plan reads: regular ones of a bounded size, as others may have written them; most hold JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from highwater.files.regular import FileTooLargeError, read_regular
from kvplan.errors import PlanError


def read_content(path: Path, limit: int, needed: str) -> bytes:
    """Return a file of ``limit`` bytes at most; a link is followed, as in a Hugging Face cache.

    Raises PlanError: it is not a regular file, cannot be read, or is larger. ``needed`` says what is expected there.
    """
    try:
        return read_regular(path, limit, follows_link=True)
    except FileTooLargeError as exc:
        raise PlanError(f"{path}: has more than {limit:,} bytes; {needed} is needed") from exc
    except (OSError, ValueError) as exc:  # a path with a null byte is a ValueError
        raise PlanError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or exc}; {needed} is needed") from exc


def read_object(path: Path, limit: int, needed: str) -> dict[str, Any]:
    """Return the object in a JSON file, as `read_content` reads it. Raises PlanError: it holds none."""
    try:
        value = json.loads(read_content(path, limit, needed).decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise PlanError(f"{path}: holds no JSON: {exc}; {needed} is needed") from exc
    if not isinstance(value, dict):
        raise PlanError(f"{path}: a JSON object is needed ({needed}), this is a {type(value).__name__}")
    return value
