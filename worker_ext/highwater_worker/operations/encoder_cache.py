"""`encoder_cache`: the entries of the encoder cache, one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from highwater_worker.devices import device_of
from highwater_worker.encoder_cache.encoder_outputs import (
    EncoderOutputs,
    Entry,
    capacity_embeds,
    entry_bytes,
    moves,
    needed_hashes,
    read_encoder_outputs,
)
from highwater_worker.errors import printable
from highwater_worker.state import state_of

MAX_ENTRIES = 10_000


def encoder_cache(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response's body."""
    outputs, state = read_encoder_outputs(worker, device_of(worker).type), state_of(worker)
    if outputs is None:
        return {"present": False, "entries": [], **_totals(None), "capacity_embeds": None, **moves(state.ledger)}
    listing = _Listing(outputs, outputs.ages(state.sightings), needed_hashes(worker))
    first = sorted(outputs.entries, key=listing.order(arguments["sort"]))[: arguments["limit"]]
    return {
        "present": True,
        "entries": [listing.row(entry) for entry in first],
        **_totals(outputs),
        "capacity_embeds": capacity_embeds(worker),
        **moves(state.ledger),
    }


def _totals(outputs: EncoderOutputs | None) -> dict[str, int]:
    return {
        "entries_total": len(outputs.entries) if outputs else 0,
        "storages": len(outputs.storages) if outputs else 0,
        "device_bytes": outputs.device_bytes if outputs else 0,
        "host_bytes": outputs.host_bytes if outputs else 0,
    }


class _Listing:
    """Writes entries as rows of the answer."""

    def __init__(self, outputs: EncoderOutputs, ages: dict[str, float], needed: set[str] | None) -> None:
        self._outputs = outputs
        self._ages = ages
        self._needed = needed
        self._sharers: dict[tuple[str, int], list[str]] = {}
        for entry in outputs.entries:
            for key in entry.storages:
                self._sharers.setdefault(key, []).append(entry.mm_hash)

    def order(self, sort: str) -> Callable[[Entry], tuple[float, str]]:
        """Return the sort key: largest or oldest first, equal ones by mm_hash so that rows do not change places."""
        if sort == "age":
            return lambda entry: (-self._ages[entry.mm_hash], entry.mm_hash)
        return lambda entry: (-entry_bytes(entry), entry.mm_hash)

    def row(self, entry: Entry) -> dict[str, Any]:
        """Return one entry."""
        only = entry.tensors[0] if len(entry.tensors) == 1 else None
        sharers = {name for key in entry.storages for name in self._sharers[key]}
        on_device = any(map(self._outputs.is_on_device, entry.storages.values()))
        return {
            "mm_hash": printable(entry.mm_hash),
            "shape": None if only is None else [int(size) for size in only.shape],
            "dtype": None if only is None else str(only.dtype).removeprefix("torch."),
            "bytes": entry_bytes(entry),
            "storage_bytes": sum(storage.nbytes for storage in entry.storages.values()),
            "shared_with": len(sharers - {entry.mm_hash}),
            "age_seconds": round(self._ages[entry.mm_hash], 3),
            "idle_seconds": None if entry.idle_seconds is None else round(entry.idle_seconds, 3),
            "residency": "device" if on_device else "host",
            "referenced": None if self._needed is None else entry.mm_hash in self._needed,
        }
