"""The operations on a worker's memory as a whole.

`budget` and `memory` read it. `release` frees no tensor: a block goes back once the last view of its storage is gone.
What the allocator still keeps after that, no release gives back; the worker remembers it.

`snapshot` is PyTorch's own memory snapshot for its viewer, written only where the disk keeps as much room again, and
in full or not at all. It walks every block of the allocator while the engine waits. `record_stacks` has the next one
say who allocated. Only the newest entries of the allocator's history are written; that torch makes objects of all of
it first cannot be avoided.
"""

from __future__ import annotations

import gc
import os
import pickle
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from highwater_worker.devices import Device, device_of, read_host
from highwater_worker.encoder_cache.spilling import refuse_now
from highwater_worker.engine_view import identity, refuse_suspended
from highwater_worker.errors import BadPayloadError, NoSpaceError, Notes
from highwater_worker.memory.allocator import AllocatorReserve
from highwater_worker.memory.engine_budget import read_engine_budget
from highwater_worker.recorder import begin_recorder, running_recorder
from highwater_worker.recorder.reading import Depth, MemoryReader
from highwater_worker.state import asleep_tags, state_of
from highwater_worker.wire import NOT_ENDED, Options, new_file

_ROOM = 2  # the free space needed, in file sizes: other ranks write theirs beside it
_MAX_TRACE_ENTRIES = 200_000
"""For each device. With stacks of 40 frames that is about 50 MB; the whole of a long history can be gigabytes."""
_OWNER_ONLY, _WITH_GROUP = 0o600, 0o640


def budget(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Return the engine's memory budget and the phases of its start: constant once the engine has started."""
    start = state_of(worker).start
    return {"engine_budget": read_engine_budget(worker, start), "start": [] if start is None else start.phases}


def memory(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    reader = MemoryReader()
    return {**reader.read(worker, Depth.ANSWER, time.monotonic()), "notes": reader.notes}


def release(worker: object, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it takes none
    """Collect garbage, then return the allocator's unused blocks to the device.

    While pools sleep nothing is collected, as garbage may lie in one that is unmapped. The rest is what vLLM itself
    does at a sleep's end (vllm 0.32.0 device_allocator/cumem.py:298), and vllm-ascend does not (0.18 to 0.23, issue
    9563): an operator's workspace stays then.
    """
    notes = Notes()
    refuse_suspended(worker)
    is_asleep = bool(asleep_tags(worker))
    device = device_of(worker)
    before = _figures(device, notes)
    collected = 0 if is_asleep else gc.collect()
    mechanism = device.give_back()
    # After the device's: copies to the host that are done by now let go of their pinned blocks.
    notes.attempt("freed_pinned_bytes", device.give_back_pinned)
    after = _figures(device, Notes(), None if is_asleep else state_of(worker).allocator_reserve)
    if mechanism == "unsupported":
        notes.add("mechanism", "the C library offers no way to return free memory to the kernel")
    # On CPU by the process's own size: the machine's free memory moves with every process.
    sizes = (after["rss_bytes"], before["rss_bytes"]), (before["free_bytes"], after["free_bytes"])
    return {
        "before": before,
        "after": after,
        "freed_bytes": _gain(*sizes[not device.is_host_memory]),  # negative where others allocated meanwhile
        "freed_pinned_bytes": _gain(after["pinned_bytes"], before["pinned_bytes"]),
        "gc_collected": collected,
        "mechanism": mechanism,
        "notes": notes.as_list(),
    }


def _figures(device: Device, notes: Notes, learning: AllocatorReserve | None = None) -> dict[str, int | None]:
    host = read_host(notes)
    space = notes.attempt("free_bytes", lambda: device.space(host))
    torch = device.allocator(notes)
    if learning is not None:
        learning.learn_after_release(device, torch)
    return {
        "free_bytes": space.free_bytes if space else None,
        "reserved_bytes": torch.reserved_bytes,
        "allocated_bytes": torch.allocated_bytes,
        "rss_bytes": host.rss_bytes,
        "pinned_bytes": notes.attempt("pinned_bytes", device.pinned_bytes),
    }


def _gain(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


# --- the recorder ---


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
    path: Path | None = None
    if not arguments["dry_run"]:
        if missing := next((key for key in ("directory", "name") if arguments[key] is None), None):
            raise BadPayloadError(f"payload key {missing!r} is missing; only with dry_run it may be")
        who = identity(worker)
        ranks = "-".join("x" if who[key] is None else str(who[key]) for key in ("dp_rank", "rank"))
        path = Path(arguments["directory"], f"highwater-snapshot-{arguments['name']}-{ranks}-{os.getpid()}.pickle")
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
