"""Records as bytes: one JSON object in ASCII each."""

from __future__ import annotations

import json
from typing import Any

encode_json = json.JSONEncoder(allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode


def encoded(record: dict[str, Any]) -> bytes:
    """Return any object as it stands in the file."""
    return encode_json(record).encode("ascii")
