"""A worker that writes its recorder file, by the letter of docs/recorder-file.md; shares no code with its reader."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INSTANCE = "00112233445566aa"
BOOT_ID = "6a1c9a0e-0f5c-4c52-9b06-5f3f1f3a2b11"
MIB = 1024 * 1024
HEADER_BYTES = 4096
SLOT_BYTES = 2048
HEARTBEAT_BYTES = 16 * 1024
TABLE_BYTES = 128 * 1024
RING_AT = HEADER_BYTES + 2 * HEARTBEAT_BYTES + 2 * TABLE_BYTES
WALL = 1_763_660_000.0
MONO = 4_000.0
BUDGET = {"gpu_memory_utilization": 0.9, "requested_bytes": 58_906_902_528, "init_free_bytes": 65_000_000_000}


def file_bytes(slots: int) -> int:
    return RING_AT + slots * SLOT_BYTES


def memory(**changes: Any) -> dict[str, Any]:
    """The ``memory`` of a sample, of one NPU that serves images."""
    return {
        "total_bytes": 65_452_113_920,
        "free_bytes": 3_987_734_528,
        "used_bytes": 61_464_379_392,
        "torch": {
            "allocated_bytes": 53_255_731_712,
            "reserved_bytes": 60_229_157_888,
            "peak_allocated_bytes": 60_000_000_000,
            "inactive_split_bytes": 123_456_789,
            "alloc_retries": 0,
            "ooms": 0,
        },
        "weights_bytes": 31_459_200_000,
        "kv_cache_bytes": 21_540_531_712,
        "encoder_cache": {
            "entries": 31,
            "device_bytes": 3_965_714_432,
            "host_bytes": 0,
            "host_entries": 0,
            "capacity_embeds": 32768,
            "embeds": 31 * 256,
            "oldest_age_seconds": 63.2,
            "spills": 0,
            "restores": 0,
            "restore_seconds": 0.0,
        },
        "host_memory": {
            "rss_bytes": 2_800_000_000,
            "cgroup_used_bytes": None,
            "cgroup_limit_bytes": None,
            "node_total_bytes": 549_755_813_888,
            "node_available_bytes": 449_755_813_888,
        },
    } | changes


def moving(**changes: Any) -> dict[str, Any]:
    """The ``moving`` of a sample or a heartbeat, between two steps."""
    return {
        "steps_begun": 12,
        "steps_ended": 12,
        "step_seconds": None,
        "last_step_mono": MONO - 0.1,
        "output_seconds": None,
        "rpc": None,
        "rpc_seconds": None,
        "call": None,
        "call_seconds": None,
    } | changes


def dump(*lines: str, thread: int = 0x7F0000001000) -> str:
    """A dump of one thread's stack, as ``faulthandler`` writes it; lines such as ``a.py:12 run``, innermost first."""
    places = (line.split(":", 1) for line in lines)
    frames = [
        f'  File "/usr/lib/python3/{file}", line {rest.split(" ")[0]} in {rest.split(" ", 1)[1]}'
        for file, rest in places
    ]
    return "\n".join([f"Thread 0x{thread:016x} (most recent call first):", *frames]) + "\n"


class FakeWriter:
    """One file, made as the contract says and written record by record."""

    def __init__(
        self, folder: Path, *, instance: str = INSTANCE, pid: int = 4242, slots: int = 64, **identity: Any
    ) -> None:
        self.path = folder / f"highwater-{instance}-{pid}.ring"
        self.slots = slots
        self.sequence = self.heartbeats = self.tables = 0
        self.identity = {
            "instance": instance,
            "rank": 0,
            "local_rank": 0,
            "dp_rank": 0,
            "tp_rank": 0,
            "pp_rank": 0,
            "host": "node-a",
            "pid": pid,
            "pid_started": 123456,
            "boot_id": BOOT_ID,
            "device": {"type": "npu", "index": 0, "name": "Ascend910B3"},
            "started_at": WALL - 60,
            "rate": 10.0,
            "seconds": 120.0,
            "extension": "0.1.0",
        } | identity
        hidden = folder / f".{self.path.name}.tmp"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.posix_fallocate(self._file, 0, file_bytes(slots))
        os.pwrite(self._file, header(json.dumps(self.identity).encode("ascii"), slots=slots), 0)
        hidden.rename(self.path)

    def close(self) -> None:
        os.close(self._file)

    # --- samples ---

    def append(self, body: dict[str, Any] | bytes) -> None:
        self.sequence += 1
        os.pwrite(self._file, slot(self.sequence, body), self.offset(self.sequence))

    def append_torn(self, body: dict[str, Any]) -> None:
        """Half of the next record: it is being written, or was when its writer died."""
        self.sequence += 1
        whole = slot(self.sequence, body)
        os.pwrite(self._file, whole[: len(whole) // 2], self.offset(self.sequence))
        self.sequence -= 1

    def damage(self, sequence: int, content: bytes = b"\xff" * 64) -> None:
        """Put something else over what begins with a record's checksum."""
        os.pwrite(self._file, content, self.offset(sequence) + 12)

    def offset(self, sequence: int) -> int:
        return RING_AT + (sequence - 1) % self.slots * SLOT_BYTES

    def sample(self, seconds: float = 0.0, **changes: Any) -> None:
        body = {"kind": "sample", **moment(seconds), "calls": 24, "memory": memory(), "moving": moving()}
        self.append(body | {"cost_ms": 0.2} | changes)

    # --- beside them ---

    def heartbeat(self, seconds: float = 0.0, **changes: Any) -> None:
        body = {
            "kind": "heartbeat",
            **moment(seconds),
            "calls": 24,
            "moving": moving(),
            "rss_bytes": None,
            "free_bytes": None,
            "dump": None,
        }
        self.append_heartbeat(body | changes)

    def append_heartbeat(self, body: dict[str, Any] | bytes) -> None:
        self.heartbeats += 1
        os.pwrite(self._file, frame(self.heartbeats, _content(body), HEARTBEAT_BYTES), self.heartbeat_at())

    def heartbeat_at(self) -> int:
        return HEADER_BYTES + (self.heartbeats - 1) % 2 * HEARTBEAT_BYTES

    def stopped(self, seconds: float = 0.0, **changes: Any) -> None:
        """The last heartbeat of a writer that ends in order."""
        self.heartbeat(seconds, kind="stopped", **changes)

    def table(self, seconds: float = 0.0, rows: Sequence[tuple[str, int, float, bool]] = (), **changes: Any) -> None:
        """An entry table of rows (mm_hash, bytes, first seen so many seconds after the beginning, on the host)."""
        head = {"kind": "entries", **moment(seconds), "total": len(rows), "budget": BUDGET} | changes
        packed = (
            struct.pack("<64sQdB7x", name.encode("ascii")[:64], size, MONO + seen, is_on_host)
            for name, size, seen, is_on_host in rows
        )
        text = json.dumps(head).encode("ascii")
        self.append_table(struct.pack("<I", len(text)) + text + b"".join(packed))

    def append_table(self, body: bytes) -> None:
        self.tables += 1
        os.pwrite(self._file, frame(self.tables, body, TABLE_BYTES), self.table_at())

    def table_at(self) -> int:
        return HEADER_BYTES + 2 * HEARTBEAT_BYTES + (self.tables - 1) % 2 * TABLE_BYTES


def moment(seconds: float) -> dict[str, float]:
    """Both clocks, so many seconds after the beginning of time in tests."""
    return {"at": WALL + seconds, "mono": MONO + seconds}


def header(identity: bytes, *, slots: int, version: int = 3, header_bytes: int = HEADER_BYTES) -> bytes:
    sizes = (SLOT_BYTES, slots, HEARTBEAT_BYTES, TABLE_BYTES, len(identity))
    start = b"HIGHWATR" + struct.pack("<HHIIIII", version, header_bytes, *sizes)
    return start + struct.pack("<I", zlib.crc32(start + identity)) + identity


def slot(sequence: int, body: dict[str, Any] | bytes) -> bytes:
    """One record of the ring, without what is left of its slot."""
    return frame(sequence, _content(body), SLOT_BYTES)


def frame(sequence: int, content: bytes, size: int) -> bytes:
    """Any record, without what is left of its area."""
    if len(content) > size - 16:
        raise ValueError(f"{len(content)} bytes do not fit into {size}")
    start = struct.pack("<QI", sequence, len(content))
    return start + struct.pack("<I", zlib.crc32(start + content)) + content


def _content(body: dict[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode("ascii")
