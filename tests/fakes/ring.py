"""A worker that writes its flight recorder, by the letter of docs/recorder.md; it shares no code with who reads it."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

INSTANCE = "00112233445566aa"
BOOT_ID = "6a1c9a0e-0f5c-4c52-9b06-5f3f1f3a2b11"
MIB = 1024 * 1024
HEADER_BYTES = 4096
SLOT_BYTES = 2048
WALL = 1_763_660_000.0
MONO = 4_000.0


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
    """The ``moving`` of a sample, between two steps."""
    return {
        "steps_begun": 12,
        "steps_ended": 12,
        "step_seconds": None,
        "last_step_mono": MONO - 0.1,
        "rpc": None,
        "rpc_seconds": None,
        "stack": None,
    } | changes


class FakeWriter:
    """One ring, made as the contract says and written record by record.

    Args:
        folder: The recorder's directory.
        instance: The engine's life.
        pid: The writer's process.
        slots: How many records the ring holds.
        identity: What its identity says beside or instead of the usual.
    """

    def __init__(
        self, folder: Path, *, instance: str = INSTANCE, pid: int = 4242, slots: int = 64, **identity: Any
    ) -> None:
        self.path = folder / f"highwater-{instance}-{pid}.ring"
        self.slots = slots
        self.sequence = 0
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
            "budget": {
                "gpu_memory_utilization": 0.9,
                "requested_bytes": 58_906_902_528,
                "init_free_bytes": 65_000_000_000,
            },
            "started_at": WALL - 60,
            "rate": 10.0,
            "seconds": 120.0,
            "extension": "0.1.0",
        } | identity
        hidden = folder / f".{self.path.name}.tmp"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.posix_fallocate(self._file, 0, HEADER_BYTES + slots * SLOT_BYTES)
        os.pwrite(self._file, header(json.dumps(self.identity).encode("ascii"), slots=slots), 0)
        hidden.rename(self.path)

    def close(self) -> None:
        """What its death does."""
        os.close(self._file)

    def append(self, body: dict[str, Any] | bytes) -> None:
        """The next record."""
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
        """Where a record stands."""
        return HEADER_BYTES + (sequence - 1) % self.slots * SLOT_BYTES

    def sample(self, seconds: float = 0.0, **changes: Any) -> None:
        """A sample, so many seconds after the beginning of time in tests."""
        body = {"kind": "sample", "at": WALL + seconds, "mono": MONO + seconds, "memory": memory(), "moving": moving()}
        self.append(body | {"cost_ms": 0.2} | changes)

    def entries(self, seconds: float = 0.0, count: int = 10, **changes: Any) -> None:
        """The largest entries."""
        largest = [
            {"mm_hash": f"{number:064x}", "bytes": 12 * MIB - number, "residency": "device", "age_seconds": 12.0}
            for number in range(count)
        ]
        body = {"kind": "entries", "at": WALL + seconds, "mono": MONO + seconds, "total": 412, "largest": largest}
        self.append(body | changes)

    def stopped(self, seconds: float = 0.0) -> None:
        """The last record of a writer that ends in order."""
        self.append({"kind": "stopped", "at": WALL + seconds, "mono": MONO + seconds})


def header(identity: bytes, *, slots: int, version: int = 1, header_bytes: int = HEADER_BYTES) -> bytes:
    """The beginning of a file."""
    start = b"HIGHWATR" + struct.pack("<HHIII", version, header_bytes, SLOT_BYTES, slots, len(identity))
    return start + struct.pack("<I", zlib.crc32(start + identity)) + identity


def slot(sequence: int, body: dict[str, Any] | bytes) -> bytes:
    """One record, without what is left of its slot."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode("ascii")
    if len(content) > SLOT_BYTES - 16:
        raise ValueError(f"{len(content)} bytes do not fit into a slot")
    start = struct.pack("<QI", sequence, len(content))
    return start + struct.pack("<I", zlib.crc32(start + content)) + content
