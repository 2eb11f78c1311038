"""`snapshot`: PyTorch's own memory snapshot into a file, for its viewer; or only how large it would be.

It refuses to write where the file would not leave the disk as much room again, and to leave half a file. Nobody asks
for it regularly: it walks every block of the allocator, and the engine stands still meanwhile.
"""

from __future__ import annotations

import os
import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_ext.devices import device_of
from worker_ext.devices.accelerator import on_main_thread
from worker_ext.errors import BadPayloadError, NoSpaceError, RefusedError
from worker_ext.identity import identity
from worker_ext.notes import Notes
from worker_ext.operations.operation import Operation
from worker_ext.payload import BooleanField, OptionalTextField

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOM = 2
"""How many times the file must fit into what is free: other ranks write theirs beside it."""
_READABLE_BY_ALL = 0o644


def snapshot(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer's body."""
    started, notes = time.perf_counter(), Notes()
    path = None if arguments["dry_run"] else _path(worker, arguments)
    if not on_main_thread():
        # The allocator's lock is waited for with Python's held, and sleep mode's calls Python under its own.
        raise RefusedError("this is not the worker's main thread, on which its steps run: one may be running now")
    device = device_of(worker)
    taken = device.family.snapshot(device.index)
    # As torch's own `_dump_snapshot` does (torch/cuda/memory.py). Whole first: it is small beside the objects that it
    # is made of, and its size is known before anything is written.
    pickled = pickle.dumps(taken)
    free: int | None = None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = _free_bytes(path.parent)
        _write(path, pickled, free)
    elif arguments["directory"] is not None:
        free = notes.attempt("free_bytes", lambda: _free_bytes(Path(arguments["directory"])))
    return {
        "path": None if path is None else str(path),
        "bytes": len(pickled),
        "segments": len(taken["segments"]),
        "blocks": sum(len(segment["blocks"]) for segment in taken["segments"]),
        "trace_entries": sum(map(len, taken.get("device_traces") or ())),
        "free_bytes": free,
        "notes": notes.as_list(),
        "elapsed_ms": round((time.perf_counter() - started) * 1000, 3),
    }


OPERATION = Operation(
    "snapshot",
    {
        "directory": OptionalTextField(r"/[^\0]{0,999}", "an absolute path, or null"),
        "name": OptionalTextField("[0-9A-Za-z_]{1,64}", "1 to 64 letters, digits and underscores, or null"),
        "dry_run": BooleanField(default=False),
    },
    snapshot,
)


def _path(worker: object, arguments: Mapping[str, Any]) -> Path:
    missing = next((key for key in ("directory", "name") if arguments[key] is None), None)
    if missing is not None:
        raise BadPayloadError(f"payload key {missing!r} is missing; only with dry_run it may be")
    who = identity(worker)
    ranks = "-".join("x" if who[key] is None else str(who[key]) for key in ("dp_rank", "rank"))
    return Path(arguments["directory"], f"highwater-snapshot-{arguments['name']}-{ranks}-{os.getpid()}.pickle")


def _free_bytes(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def _write(path: Path, pickled: bytes, free: int) -> None:
    if free < _ROOM * len(pickled):
        raise NoSpaceError(
            f"{path.parent} has {free} bytes free; a snapshot of {len(pickled)} bytes is written where there are "
            f"{_ROOM} times as many"
        )
    hidden = path.with_name(f".{path.name}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(hidden, flags, _READABLE_BY_ALL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # Whatever the process's umask: the reader is another user in another container.
            os.fchmod(file.fileno(), _READABLE_BY_ALL)
            file.write(pickled)
        hidden.rename(path)
    except BaseException:
        with suppress(OSError):
            hidden.unlink()
        raise
