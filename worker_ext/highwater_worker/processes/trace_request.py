"""A request for a trace of this process: a file of a known name in the recorders' folder, and who may put it there.

The folder may be shared, so the file must be of this process's user or of root, and nobody else may have written to it;
it must name this process by machine start, number and start, and be fresh. What is not so is never acted upon.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

from highwater_worker.attributes import fraction, whole
from highwater_worker.identity import pid_started
from highwater_worker.recorder.identity import boot_id

SUFFIX = ".trace-request"
MAX_BYTES = 1024
MAX_MINUTES = 60.0
MAX_FRAMES = 8
FRESH_SECONDS = 60.0
_ROOT = Path("/")
_ID = re.compile("[0-9a-f]{16}")
_OTHERS_MAY_WRITE = 0o022


class TraceRequest(NamedTuple):
    """A request that may be acted upon."""

    id: str
    action: str
    """`start` or `stop`."""
    minutes: float
    frames: int


class BadRequestError(Exception):
    """The file is there and is not to be acted upon; says why."""


def read_request(path: str, now: float, root: Path = _ROOT) -> TraceRequest | None:
    """Return the request at a path, and remove the file; None, after one look at the folder, where there is none.

    Args:
        path: Where it would be.
        now: Unix seconds.
        root: The file system's root; a test brings its own.

    Raises:
        BadRequestError: It is not to be acted upon.
    """
    try:
        os.lstat(path)
    except OSError:
        return None
    try:
        return _checked(_text(path, now), root)
    finally:
        try:
            os.unlink(path)
        except OSError as error:
            # It would be found again each second.
            raise BadRequestError(f"the request cannot be removed: {error.strerror}") from error


def _text(path: str, now: float) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadRequestError(f"the request cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise BadRequestError("the request is no file of its own")
        if status.st_uid not in (os.geteuid(), 0):
            raise BadRequestError(
                f"the request is of user {status.st_uid}; it must be of user {os.geteuid()}, the engine's, or of root"
            )
        if status.st_mode & _OTHERS_MAY_WRITE:
            raise BadRequestError("others may write to the request; its mode must be 0644 or stricter")
        if not 0 < status.st_size <= MAX_BYTES:
            raise BadRequestError(f"the request has {status.st_size} bytes; it must have 1 to {MAX_BYTES}")
        if abs(now - status.st_mtime) > FRESH_SECONDS:
            raise BadRequestError(f"the request is older than {FRESH_SECONDS:.0f} s")
        return os.read(descriptor, MAX_BYTES)
    finally:
        os.close(descriptor)


def _checked(text: bytes, root: Path) -> TraceRequest:
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError("the request is no JSON") from error
    if not isinstance(given, dict) or given.get("schema") != 1:
        raise BadRequestError("the request is of another version")
    mine = {"boot_id": boot_id(root), "pid": os.getpid(), "started": pid_started(root)}
    for key, value in mine.items():
        if given.get(key) != value:
            raise BadRequestError(f"the request is for another process: its {key} is not {value}")
    action, name = given.get("action"), given.get("id")
    minutes, frames = fraction(given.get("minutes")), whole(given.get("frames"))
    if not isinstance(name, str) or _ID.fullmatch(name) is None or action not in ("start", "stop"):
        raise BadRequestError("the request has no id of 16 hexadecimal digits, or no action start or stop")
    if minutes is None or not 0 < minutes <= MAX_MINUTES:
        raise BadRequestError(f"the request's minutes must be above 0 and at most {MAX_MINUTES:.0f}")
    if frames is None or not 1 <= frames <= MAX_FRAMES:
        raise BadRequestError(f"the request's frames must be 1 to {MAX_FRAMES}")
    return TraceRequest(name, str(action), minutes, frames)
