"""A recorder's file, taken apart by the structures of the wire, whose bytes tests/fakes/ring.py has written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from highwater_worker.wire import (
    HEAD_LENGTH,
    RING_HEAD,
    RING_MAGIC,
    RING_VERSION,
    ROW,
    Layout,
    checked_body,
    frame_body,
)


def opened(path: Path) -> tuple[bytes, Layout, bytes]:
    """Return a file's content, its layout, and the identity in its header."""
    data = path.read_bytes()
    magic, version, *sizes, length = RING_HEAD.unpack_from(data)
    assert (magic, version) == (RING_MAGIC, RING_VERSION)
    layout, identity = Layout(*sizes), checked_body(data, RING_HEAD.size, length)
    assert identity is not None
    assert len(data) >= layout.nbytes
    assert layout in (Layout.of(layout.slots, 0), Layout.of(layout.slots, 4096))
    return data, layout, identity


def newer(data: bytes, at: int, size: int) -> bytes | None:
    """Return the body that was written last of two areas; None where neither was."""
    found = [one for start in (at, at + size) if (one := frame_body(data[start : start + size])) is not None]
    return max(found)[1] if found else None


def parse(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the identity, and the whole records of the ring by their number."""
    data, layout, identity = opened(path)
    found: dict[int, dict[str, Any]] = {}
    for slot in range(layout.slots):
        start = layout.ring_at + slot * layout.slot_bytes
        record = frame_body(data[start : start + layout.slot_bytes])
        if record is None:
            continue
        sequence, body = record
        assert (sequence - 1) % layout.slots == slot
        assert body.isascii()
        found[sequence] = json.loads(body)
    return json.loads(identity), dict(sorted(found.items()))


def records(path: Path) -> list[dict[str, Any]]:
    """Return the whole records of the ring, oldest first."""
    return list(parse(path)[1].values())


def heartbeat(path: Path) -> dict[str, Any] | None:
    data, layout, _ = opened(path)
    body = newer(data, layout.header_bytes, layout.heartbeat_bytes)
    return None if body is None else json.loads(body)


def table(path: Path) -> tuple[dict[str, Any], list[tuple[str, int, float, int]]] | None:
    """Return the last entry table: its head, and its rows."""
    data, layout, _ = opened(path)
    body = newer(data, layout.tables_at, layout.table_bytes)
    if body is None:
        return None
    rows_at = HEAD_LENGTH.size + HEAD_LENGTH.unpack_from(body)[0]
    rows = [(name.rstrip(b"\0").decode("ascii"), *rest) for name, *rest in ROW.iter_unpack(body[rows_at:])]
    return json.loads(body[HEAD_LENGTH.size : rows_at]), rows
