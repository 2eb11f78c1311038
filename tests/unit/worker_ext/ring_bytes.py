"""A recorder's file, taken apart by hand: what docs/recorder.md says, and nothing of the code that writes it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any


def number(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def parse(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the identity, and the whole records by their number."""
    data = path.read_bytes()
    assert data[:8] == b"HIGHWATR"
    assert (number(data, 8, 2), number(data, 10, 2), number(data, 12, 4)) == (1, 4096, 2048)
    slots, length = number(data, 16, 4), number(data, 20, 4)
    assert len(data) == 4096 + slots * 2048
    identity = data[28 : 28 + length]
    assert number(data, 24, 4) == zlib.crc32(data[:24] + identity)
    found: dict[int, dict[str, Any]] = {}
    for slot in range(slots):
        start = 4096 + slot * 2048
        sequence, size = number(data, start, 8), number(data, start + 8, 4)
        body = data[start + 16 : start + 16 + size]
        if number(data, start + 12, 4) != zlib.crc32(data[start : start + 12] + body):
            continue  # being written
        if sequence == 0:
            assert not any(data[start : start + 2048]), "an empty slot is all zero"
            continue
        assert (sequence - 1) % slots == slot
        assert body.isascii()
        found[sequence] = json.loads(body)
    return json.loads(identity), dict(sorted(found.items()))


def records(path: Path) -> list[dict[str, Any]]:
    """Return the whole records, oldest first."""
    return list(parse(path)[1].values())
