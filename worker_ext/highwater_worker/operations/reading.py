"""The operations that only read: `budget`, `memory`, `encoder_cache`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from highwater_worker.devices import device_of
from highwater_worker.encoder_cache.spilling_dict import Entry, read_entries
from highwater_worker.engine_view import needed_hashes
from highwater_worker.errors import printable
from highwater_worker.memory.engine_budget import read_engine_budget
from highwater_worker.recorder.encoder_index import read_index
from highwater_worker.recorder.reading import Depth, MemoryReader
from highwater_worker.state import state_of

MAX_ENTRIES = 10_000


def budget(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the engine's memory budget and the phases of its start: constant once the engine has started."""
    start = state_of(worker).start
    return {"engine_budget": read_engine_budget(worker, start), "start": [] if start is None else start.phases}


def memory(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    reader = MemoryReader()
    return {**reader.read(worker, Depth.ANSWER, time.monotonic()), "notes": reader.notes}


def encoder_cache(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """List the largest or oldest entries; equal ones by mm_hash, so that rows do not change places."""
    device, ledger = device_of(worker), state_of(worker).ledger
    entries, index = read_entries(worker), read_index(worker, device)
    figures, ages = index.figures(worker) or {}, index.ages()
    needed = None if entries is None else needed_hashes(worker)
    sharers: dict[tuple[str, int], set[str]] = {}
    for entry in entries or ():
        for key in entry.storages:
            sharers.setdefault(key, set()).add(entry.mm_hash)

    def order(entry: Entry) -> tuple[float, str]:
        return -(ages.get(entry.mm_hash, 0.0) if arguments["sort"] == "age" else entry.nbytes), entry.mm_hash

    def row(entry: Entry) -> dict[str, Any]:
        only = entry.tensors[0] if len(entry.tensors) == 1 else None
        on_device = any(storage.device_type == device.type for storage in entry.storages.values())
        return {
            "mm_hash": printable(entry.mm_hash),
            "shape": None if only is None else [int(size) for size in only.shape],
            "dtype": None if only is None else str(only.dtype).removeprefix("torch."),
            "bytes": entry.nbytes,
            "storage_bytes": sum(storage.nbytes for storage in entry.storages.values()),
            "shared_with": len(set().union(*(sharers[key] for key in entry.storages)) - {entry.mm_hash}),
            "age_seconds": round(ages.get(entry.mm_hash, 0.0), 3),
            "idle_seconds": None if entry.idle_seconds is None else round(entry.idle_seconds, 3),
            "residency": "device" if on_device else "host",
            "referenced": None if needed is None else entry.mm_hash in needed,
        }

    return {
        "present": entries is not None,
        "entries": [row(entry) for entry in sorted(entries or (), key=order)[: arguments["limit"]]],
        "entries_total": len(entries or ()),
        "storages": len(sharers),
        "device_bytes": figures.get("device_bytes", 0),
        "host_bytes": figures.get("host_bytes", 0),
        "capacity_embeds": figures.get("capacity_embeds"),
        **ledger.figures(),
    }
