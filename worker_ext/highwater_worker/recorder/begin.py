"""Starting a worker's recorder: asked for by a sidecar, or by the environment as the worker comes up.

It refuses to begin what it could not go on with (the file has its whole size before the first record, or the old
recorder goes on), and to write where another machine may keep the engine waiting.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from highwater_worker.attributes import look_up
from highwater_worker.encoder_cache.encoder_outputs import find_encoder_cache
from highwater_worker.errors import BadPayloadError, RefusedError
from highwater_worker.identity import EXTENSION_VERSION
from highwater_worker.recorder.bodies import encoded
from highwater_worker.recorder.file_system import file_system_of, is_in_memory, is_remote
from highwater_worker.recorder.identity import boot_id, file_identity
from highwater_worker.recorder.old_files import remove_old_files
from highwater_worker.recorder.recorder import NOT_ENDED, Options, Recorder
from highwater_worker.recorder.ring import make_ring
from highwater_worker.state import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from highwater_worker.notes import Notes
    from highwater_worker.recorder.ring import Layout, Ring

DIRECTORY = "HIGHWATER_RECORDER_DIR"
RATE, MIN_RATE, MAX_RATE = 10.0, 1.0, 100.0
SECONDS, MIN_SECONDS, MAX_SECONDS = 120.0, 10.0, 3600.0


def begin_recorder(worker: object, options: Options, notes: Notes, *, is_starting: bool = False) -> Recorder:
    """Start one in the place of any other, and return it.

    Args:
        worker: The worker.
        options: What is asked for.
        notes: Gets what will not be recorded.
        is_starting: The model is not loaded yet: nobody can say whether there will be an encoder cache, and perhaps
            no sidecar removes the files of earlier starts.

    Raises:
        RefusedError: The folder is not on this machine.
        NoSpaceError: The disk has no room for the file.
        OSError: The file cannot be made.
    """
    state = state_of(worker)
    kind = file_system_of(options.directory)
    if is_remote(kind):
        raise RefusedError(
            f"directory {str(options.directory)!r} lies on {kind}: a server that is gone would hold the engine up; "
            "it must be on this machine, best in memory, such as a folder in /dev/shm"
        )
    identity = {
        **file_identity(worker, options.instance, notes),
        "started_at": round(time.time(), 3),
        "rate": options.rate,
        "seconds": options.seconds,
        "extension": EXTENSION_VERSION,
        "self_started": is_starting,
    }
    has_cache = is_starting or notes.attempt("encoder_cache", lambda: find_encoder_cache(worker) is not None)
    layout = options.layout(has_entries=has_cache is not False)
    ring = _make_ring(options, encoded(identity), layout, is_starting=is_starting)
    try:
        recorder = Recorder(worker, ring, options, in_memory=is_in_memory(kind))
        if state.recorder is not None and not state.recorder.stop():
            notes.add("path", f"the recorder before this one {NOT_ENDED}")
        recorder.start(notes)
    except BaseException:
        ring.discard()
        raise
    state.recorder = recorder
    return recorder


def _make_ring(options: Options, identity: bytes, layout: Layout, *, is_starting: bool) -> Ring:
    path = options.path(os.getpid())
    if not is_starting:
        return make_ring(path, identity, layout)
    remove_old_files(options.directory, options.instance)
    try:
        return make_ring(path, identity, layout)
    except OSError as error:
        if getattr(error.__cause__, "errno", None) != errno.ENOSPC:
            raise
        remove_old_files(options.directory, options.instance, has_room=False)
        return make_ring(path, identity, layout)


def options_from(environ: Mapping[str, str], instance: str) -> Options:
    """Return what the environment asks for.

    Args:
        environ: Holds `HIGHWATER_RECORDER_DIR`, and perhaps `HIGHWATER_RECORDER_RATE` (samples a second) and
            `HIGHWATER_RECORDER_SECONDS` (how far back the file reaches).
        instance: The name of the engine's life.

    Raises:
        BadPayloadError: A value is invalid; names the variable, the value and what would be right.
    """
    directory = environ[DIRECTORY]
    if not directory.startswith("/") or "\0" in directory:
        raise BadPayloadError(f"{DIRECTORY} is {directory!r}; it must be an absolute path")
    rate = _number(environ, "HIGHWATER_RECORDER_RATE", RATE, MIN_RATE, MAX_RATE)
    seconds = _number(environ, "HIGHWATER_RECORDER_SECONDS", SECONDS, MIN_SECONDS, MAX_SECONDS)
    return Options(Path(directory), instance, rate, seconds)


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
    """Return a name that all workers of one life of one engine share, and no others: 16 hexadecimal digits.

    vLLM draws an id for each configuration that it makes, and hands it to every process (vllm 0.12.0
    config/vllm.py:882, vllm 0.32.0 config/vllm.py:2119); of a data-parallel engine under Ray it marks the copies
    (vllm 0.32.0 v1/engine/utils.py:485).

    Raises:
        RefusedError: This vLLM has no such id.
    """
    found = look_up(worker, "vllm_config", "instance_id")
    if not isinstance(found, str) or not found:
        raise RefusedError("this vLLM does not tell which engine a worker belongs to (vllm_config.instance_id)")
    life = re.sub(r"_dp\d+$", "", found)
    return hashlib.sha256(f"{boot_id()}/{life}".encode()).hexdigest()[:16]
