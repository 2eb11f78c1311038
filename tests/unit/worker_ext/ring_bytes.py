"""A recorder's file, taken apart by hand: what docs/recorder-file.md says, and nothing of the code that writes it."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

HEARTBEAT_BYTES = 16 * 1024
STACK_BYTES = 64 * 1024
HEARTBEATS_AT = 4096
TABLES_AT = HEARTBEATS_AT + 2 * HEARTBEAT_BYTES


def number(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def file_bytes(slots: int, rows: int) -> int:
    return TABLES_AT + 2 * table_bytes(rows) + slots * 2048 + STACK_BYTES


def table_bytes(rows: int) -> int:
    return 32768 + rows * 88


def ring_at(data: bytes) -> int:
    return TABLES_AT + 2 * number(data, 24, 4)


def frame(data: bytes, start: int) -> tuple[int, bytes] | None:
    """A number and a body; None where it is being written, or where nothing is."""
    sequence, size = number(data, start, 8), number(data, start + 8, 4)
    body = data[start + 16 : start + 16 + size]
    if number(data, start + 12, 4) != zlib.crc32(data[start : start + 12] + body) or not sequence:
        return None
    return sequence, body


def parse(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the identity, and the whole records of the ring by their number."""
    data = path.read_bytes()
    assert data[:8] == b"HIGHWATR"
    assert (number(data, 8, 2), number(data, 10, 2), number(data, 12, 4)) == (2, 4096, 2048)
    slots, heartbeat, table, stack, length = (number(data, at, 4) for at in (16, 20, 24, 28, 32))
    assert (heartbeat, stack) == (HEARTBEAT_BYTES, STACK_BYTES)
    assert len(data) >= ring_at(data) + slots * 2048 + stack
    assert table in (table_bytes(0), table_bytes(4096))
    identity = data[40 : 40 + length]
    assert number(data, 36, 4) == zlib.crc32(data[:36] + identity)
    found: dict[int, dict[str, Any]] = {}
    for slot in range(slots):
        start = ring_at(data) + slot * 2048
        record = frame(data, start)
        if record is None:
            continue
        sequence, body = record
        assert (sequence - 1) % slots == slot
        assert body.isascii()
        found[sequence] = json.loads(body)
    return json.loads(identity), dict(sorted(found.items()))


def records(path: Path) -> list[dict[str, Any]]:
    """Return the whole records of the ring, oldest first."""
    return list(parse(path)[1].values())


def heartbeat(path: Path) -> dict[str, Any] | None:
    data = path.read_bytes()
    found = [one for n in (0, 1) if (one := frame(data, HEARTBEATS_AT + n * HEARTBEAT_BYTES)) is not None]
    return json.loads(max(found)[1]) if found else None


def table(path: Path) -> tuple[dict[str, Any], list[tuple[str, int, float, int]]] | None:
    """Return the last entry table: its head, and its rows."""
    data = path.read_bytes()
    size = number(data, 24, 4)
    found = [one for n in (0, 1) if (one := frame(data, TABLES_AT + n * size)) is not None]
    if not found:
        return None
    body = max(found)[1]
    length = number(body, 0, 4)
    rows = struct.iter_unpack("<64sQdB7x", body[4 + length :])
    unpadded = [(name.rstrip(b"\0").decode("ascii"), *rest) for name, *rest in rows]
    return json.loads(body[4 : 4 + length]), unpadded


def watchdog(path: Path) -> tuple[float, float, str]:
    """Return the stack area: when the watchdog was moved on, after how long it writes, and what it wrote."""
    data = path.read_bytes()
    start = ring_at(data) + number(data, 16, 4) * 2048
    return *struct.unpack_from("<dd", data, start), data[start + 16 :].partition(b"\0")[0].decode("ascii")
