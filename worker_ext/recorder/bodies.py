"""Records as bytes: one JSON object in ASCII each, cut to what a slot holds."""

from __future__ import annotations

import json
from typing import Any

from worker_ext.recorder.ring import MOST_BODY_BYTES

_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode


def encoded(record: dict[str, Any]) -> bytes:
    """Return any object as it stands in the file."""
    return _encode(record).encode("ascii")


def fitting(record: dict[str, Any], rows: list[Any] | None) -> bytes:
    """Return a record that fits into a slot.

    Args:
        record: The record.
        rows: A list in it that loses rows from its end until it does; None where there is none.
    """
    body = encoded(record)
    while rows and len(body) > MOST_BODY_BYTES:
        rows.pop()
        body = encoded(record)
    return body
