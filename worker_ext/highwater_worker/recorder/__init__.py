"""The recorder: it writes one worker's memory and progress to a file, up to the worker's last moment.

docs/recorder-file.md describes the file's format. The engine's own thread samples between two steps; the recorder's
thread writes a heartbeat, the host's figures, and all threads' stacks when something takes long. It never touches
torch, the device or the garbage collector, and never waits for the engine's thread.

Here it starts: on a sidecar's request, or by the environment as the worker comes up, once its file has its full size;
until then an old one goes on. It never writes where another machine may keep the engine waiting.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater_worker.devices import describe_device
from highwater_worker.engine_view import (
    engine_id,
    find_encoder_cache,
    identity,
    model_name,
    parallel_sizes,
    ranks_expected,
    short_text,
)
from highwater_worker.errors import BadPayloadError, Notes, RefusedError
from highwater_worker.kernel.proc import boot_id, file_system_of, is_in_memory, is_remote, pid_namespace, pid_started
from highwater_worker.recorder.recorder import Recorder
from highwater_worker.state import ATTRIBUTE, state_of
from highwater_worker.wire import (
    EXTENSION_VERSION,
    NOT_ENDED,
    Layout,
    Options,
    Ring,
    encoded,
    make_ring,
    remove_old_rings,
)

DIRECTORY = "HIGHWATER_RECORDER_DIR"
RATE, MIN_RATE, MAX_RATE = 10.0, 1.0, 100.0
SECONDS, MIN_SECONDS, MAX_SECONDS = 120.0, 10.0, 3600.0


def begin_recorder(worker: object, options: Options, notes: Notes, *, is_starting: bool = False) -> Recorder:
    """Start a recorder in the place of any other, and return it; `notes` gets the values that will not be recorded.

    While the model is not loaded yet (`is_starting`), it is unknown whether there will be an encoder cache, and perhaps
    no sidecar removes the files of earlier starts. Raises RefusedError where the folder is not on this machine, OSError
    where the file cannot be made.
    """
    state = state_of(worker)
    kind = file_system_of(options.directory)
    if is_remote(kind):
        raise RefusedError(
            f"directory {str(options.directory)!r} lies on {kind}: a server that is gone would hold the engine up; "
            "it must be on this machine, best in memory, such as a folder in /dev/shm"
        )
    head = {
        **_identity(worker, options.instance, notes),
        "started_at": round(time.time(), 3),
        "rate": options.rate,
        "seconds": options.seconds,
        "extension": EXTENSION_VERSION,
        "self_started": is_starting,
    }
    has_cache = is_starting or notes.attempt("encoder_cache", lambda: find_encoder_cache(worker) is not None)
    layout = options.layout(has_entries=has_cache is not False)
    ring = _make_ring(options, encoded(head), layout, is_starting=is_starting)
    try:
        recorder = Recorder(worker, ring, options, in_memory=is_in_memory(kind))
        if isinstance(state.recorder, Recorder) and not state.recorder.stop():
            notes.add("path", f"the recorder before this one {NOT_ENDED}")
        recorder.start(notes)
    except BaseException:
        ring.close(removes=True)
        raise
    state.recorder = recorder
    return recorder


def _identity(worker: object, instance: str, notes: Notes) -> dict[str, Any]:
    """Return the head of a recorder's file, without the time and the options of its start."""
    ranks = identity(worker)
    device = describe_device(worker, notes)[1]
    return {
        "instance": instance,
        **ranks,
        # The machine chooses these names, and the file's header has a fixed size.
        "host": short_text(ranks["host"]),
        "pid_started": notes.attempt("pid_started", pid_started),
        "boot_id": notes.attempt("boot_id", boot_id),
        "pid_namespace": notes.attempt("pid_namespace", pid_namespace),
        "device": {**device, **{name: short_text(device[name]) for name in ("type", "name", "uuid")}},
        "model": short_text(notes.attempt("model", lambda: model_name(worker))),
        "rpc": callable(getattr(worker, "highwater_rpc", None)),
        "ranks_expected": notes.attempt("ranks_expected", lambda: ranks_expected(worker)),
        **parallel_sizes(worker),
    }


def _make_ring(options: Options, identity: bytes, layout: Layout, *, is_starting: bool) -> Ring:
    path = options.path(os.getpid())
    if not is_starting:
        return make_ring(path, identity, layout)
    remove_old_rings(options.directory, options.instance)
    try:
        return make_ring(path, identity, layout)
    except OSError as error:
        if getattr(error.__cause__, "errno", None) != errno.ENOSPC:
            raise
        remove_old_rings(options.directory, options.instance, has_room=False)
        return make_ring(path, identity, layout)


def folder_from(environ: Mapping[str, str]) -> Path | None:
    """Return `HIGHWATER_RECORDER_DIR`, None without it. Raises BadPayloadError: it is no absolute path."""
    directory = environ.get(DIRECTORY)
    if directory and (not directory.startswith("/") or "\0" in directory):
        raise BadPayloadError(f"{DIRECTORY} is {directory!r}; it must be an absolute path")
    return Path(directory) if directory else None


def options_from(environ: Mapping[str, str], folder: Path, instance: str) -> Options:
    """Return the options in the environment.

    It may have `HIGHWATER_RECORDER_RATE` (samples a second) and `HIGHWATER_RECORDER_SECONDS` (of the past in the file).
    Raises BadPayloadError, which names the variable, the value and what is valid.
    """
    rate = _number(environ, "HIGHWATER_RECORDER_RATE", RATE, MIN_RATE, MAX_RATE)
    seconds = _number(environ, "HIGHWATER_RECORDER_SECONDS", SECONDS, MIN_SECONDS, MAX_SECONDS)
    return Options(folder, instance, rate, seconds)


def _number(environ: Mapping[str, str], name: str, default: float, minimum: float, maximum: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not minimum <= value <= maximum:
        raise BadPayloadError(f"{name} is {text!r}; it must be a number from {minimum:g} to {maximum:g}")
    return value


def instance_of(worker: object) -> str:
    """Return `engine_id` on this boot of the machine, in 16 hexadecimal digits. Raises as these two."""
    return hashlib.sha256(f"{boot_id()}/{engine_id(worker)}".encode()).hexdigest()[:16]


def running_recorder(worker: object) -> Recorder | None:
    """Return the recorder that runs for the worker, None without one; no state is made."""
    recorder = getattr(getattr(worker, ATTRIBUTE, None), "recorder", None)
    return recorder if isinstance(recorder, Recorder) and recorder.is_running() else None


def end_recorder(worker: object) -> bool:
    """End the worker's recorder, even one that another call started; False if its thread has not ended."""
    recorder = running_recorder(worker)
    if recorder is None:
        return True
    state_of(worker).recorder = None
    return recorder.stop()
