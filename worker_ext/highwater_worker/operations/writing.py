"""The operations that write files: `recorder_start` and `recorder_stop`, `snapshot` and `record_stacks`.

A recorder's file has the worker's memory and progress, many times a second, and outlives it, whatever ends it. A
recorder that another caller started goes on.

`snapshot` is PyTorch's own memory snapshot for its viewer, written only where the disk keeps as much room again, and
in full or not at all. It walks every block of the allocator while the engine waits. `record_stacks` has the next one
say who allocated. Only the newest entries of the allocator's history are written; that torch makes objects of all of
it first cannot be avoided.
"""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from highwater_worker.devices import device_of
from highwater_worker.engine_view import identity
from highwater_worker.errors import BadPayloadError, NoSpaceError, Notes
from highwater_worker.recorder.begin import begin_recorder, running_recorder
from highwater_worker.spill.spilling import refuse_now
from highwater_worker.state import state_of
from highwater_worker.wire import Options, new_file
from highwater_worker.writer import NOT_ENDED

_ROOM = 2  # the free space needed, in file sizes: other ranks write theirs beside it
_MAX_TRACE_ENTRIES = 200_000
"""For each device. With stacks of 40 frames that is about 50 MB; the whole of a long history can be gigabytes."""
_OWNER_ONLY, _WITH_GROUP = 0o600, 0o640


def recorder_start(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    notes = Notes()
    options = Options(
        Path(arguments["directory"]), arguments["instance"], float(arguments["rate"]), float(arguments["seconds"])
    )
    recorder = running_recorder(worker)
    # A running one stays, for whatever caller and arguments it was started, unless its file cannot be found any more.
    already = recorder is not None and recorder.ring.is_there()
    if recorder is None or not already:
        recorder = begin_recorder(worker, options, notes)
    return {
        "path": str(recorder.ring.path),
        "instance": recorder.options.instance,
        "bytes": recorder.ring.layout.nbytes,
        "slots": recorder.ring.layout.slots,
        "already": already,
        "other": recorder.options.instance != options.instance,
        "notes": notes.as_list(),
    }


def recorder_stop(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Stop the recorder of one name. The file stays, for its readers."""
    notes, recorder = Notes(), running_recorder(worker)
    stopped = False
    if recorder is None:
        notes.add("stopped", "no recorder runs")
    elif recorder.options.instance != arguments["instance"]:
        notes.add("stopped", f"the recorder that runs is {recorder.options.instance}: another caller started it")
    else:
        stopped = recorder.stop()
        state_of(worker).recorder = None
        if not stopped:
            notes.add("stopped", f"the recorder {NOT_ENDED}")
    return {"stopped": stopped, "path": str(recorder.ring.path) if recorder else None, "notes": notes.as_list()}


# --- PyTorch's memory snapshot ---


def snapshot(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    notes = Notes()
    path = None if arguments["dry_run"] else _path(worker, arguments)
    # The allocator's lock is waited for with Python's held, and sleep mode's calls Python under its own.
    refuse_now(worker)
    device = device_of(worker)
    taken = device.snapshot()
    traces = taken.get("device_traces") or ()
    total, newest = sum(map(len, traces)), [trace[-_MAX_TRACE_ENTRIES:] for trace in traces]
    if sum(map(len, newest)) < total:
        taken = {**taken, "device_traces": newest}
        notes.add("trace_entries", f"the newest {_MAX_TRACE_ENTRIES} of each device, of {total} in all")
    # As torch's own `_dump_snapshot` does (torch 2.13.0 cuda/memory.py:1148). Whole first: it is small beside the
    # objects that it is made of, and its size is known before anything is written.
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
    }


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
    with new_file(path, _OWNER_ONLY) as descriptor:
        # The group that may write into the folder may read it: the sidecar's, where that is another user. Nobody else:
        # it may hold stack traces of the engine's code, and the sidecar gives it to administrators only.
        folder = os.stat(path.parent)
        if folder.st_mode & stat.S_IWGRP:
            with suppress(OSError):  # a group that this process is not in; then it stays the owner's
                os.fchown(descriptor, -1, folder.st_gid)
                os.fchmod(descriptor, _WITH_GROUP)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(pickled)
    os.close(descriptor)


def record_stacks(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    history = state_of(worker).history
    was_on, minutes = history.is_on, float(arguments["minutes"])
    refuse_now(worker)
    if minutes:
        history.start(worker, device_of(worker), minutes * 60, arguments["entries"])
    else:
        history.stop()
    left = history.seconds_left()
    return {
        "recording": history.is_on,
        "was_recording": was_on,
        "seconds_left": None if left is None else round(left, 1),
        "entries": arguments["entries"] if history.is_on else None,
    }
