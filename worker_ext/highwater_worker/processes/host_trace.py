"""A trace of this process's Python memory, on request: the lines that hold more at its end than a while before.

Nothing happens until a request lies in the recorders' folder: until then `tick` costs one look at the folder. A trace
is made by the thread that calls `tick` alone. It ends when its time is over, on request, or when tracemalloc itself
takes more than `MAX_TRACER_BYTES`. A process that uses tracemalloc by itself is left alone.

The folder may be shared. So a request must be a file of this process's user or of root that nobody else may write to,
must name this process by boot, number and start, and must be fresh; any other is never acted upon.

Ending it: in CPython before 3.12.9 and 3.13.2 `tracemalloc.stop` can crash a thread that is about to note an
allocation without holding Python's lock (https://github.com/python/cpython/issues/128679). Such a thread waits for that
lock. So the traces are dropped first, which takes long; then the lock is given up for a moment, so that whoever waits
is served; then `stop`, with nothing left to drop, takes microseconds. No reading is under way meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from highwater_worker.attributes import fraction, whole
from highwater_worker.errors import describe, printable
from highwater_worker.files import ROOT, encoded, new_file, remove_silent
from highwater_worker.identity import boot_id, pid_started
from highwater_worker.processes.figures import read_figures, read_malloc

SUFFIX = ".trace-request"
MAX_BYTES = 1024
MAX_MINUTES = 60.0
MAX_FRAMES = 8
FRESH_SECONDS = 60.0
_ID = re.compile("[0-9a-f]{16}")
_OTHERS_MAY_WRITE = 0o022
RESULT_SUFFIX = ".trace.json"
MAX_TRACER_BYTES = 128 << 20
MAX_RESULT_BYTES = 4096
MAX_LINES = 12
_BASELINE_SHARE = 0.25
_MAX_BASELINE = 20_000
_MAX_FILE = 110
_READABLE_BY_ALL = 0o644
_OLD_SECONDS = 86_400.0
_YIELD_SECONDS = 0.02
_OWN = str(Path(__file__).resolve().parents[1])


class TraceRequest(NamedTuple):
    """A valid request."""

    id: str
    action: str
    """`start` or `stop`."""
    minutes: float
    frames: int


class BadRequestError(Exception):
    """The request is invalid; the message says why."""


def read_request(path: str, now: float, root: Path = ROOT) -> TraceRequest | None:
    """Return the request at a path, and remove the file; None without a file. `now` is in Unix seconds.

    Raises:
        BadRequestError: The request must not be acted upon.
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
            # It would be read again each second.
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


class HostTrace:
    """One process's traces, one at a time.

    Args:
        folder: The recorders'.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        root: The file system's root.
        tracer: A substitute for the module tracemalloc, which is imported when it is first needed.
        pause: Gives up Python's lock for so many seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        root: Path = Path("/"),
        tracer: Any = None,  # noqa: ANN401 - a module
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._root = root
        self._tracer = tracer
        self._pause = pause
        self._stem = ""
        self._request: TraceRequest | None = None
        self._result: dict[str, Any] = {}
        self._until = self._baseline_due = 0.0
        self._baseline: dict[Any, tuple[int, int]] | None = None

    @property
    def is_running(self) -> bool:
        """True while a trace is under way."""
        return self._request is not None

    def tick(self) -> None:
        """Look for a request, and let the trace that is under way go on or end; never raises."""
        try:
            self._tick()
        except Exception as error:  # noqa: BLE001 - the process's thread goes on, and the engine beside it
            self._failed(error)

    def _tick(self) -> None:
        if not self._stem:
            self._stem = f"{self._folder}/highwater-{os.getpid()}-{pid_started(self._root)}"
        try:
            request = read_request(self._stem + SUFFIX, self._wall_clock(), self._root)
        except BadRequestError as error:
            if self.is_running:
                self._look()  # whoever may write into the folder must not keep a trace from ending
                return
            self._result = {}
            self._write({"state": "refused", "why": printable(str(error), 200)})
            return
        if request is not None and request.action == "stop":
            if self.is_running:
                self._end("it was asked to stop")
        elif request is not None and not self.is_running:
            self._begin(request)
        elif self.is_running:  # a second request is ignored: the result file shows the first
            self._look()

    def _begin(self, request: TraceRequest) -> None:
        tracer = self._tracer = self._tracer or import_module("tracemalloc")
        self._result = {"id": request.id}
        if not _has_python_lock():
            self._write({"state": "refused", "why": "this Python runs without its lock: tracemalloc may crash there"})
            return
        if tracer.is_tracing():
            self._write({"state": "refused", "why": "this process uses tracemalloc itself, and is left alone"})
            return
        remove_silent(self._folder, RESULT_SUFFIX, self._wall_clock() - _OLD_SECONDS)
        now, seconds = self._clock(), request.minutes * 60
        self._until, self._baseline_due = now + seconds, now + seconds * _BASELINE_SHARE
        self._baseline = None
        self._result.update(
            began=round(self._wall_clock(), 3),
            seconds=seconds,
            frames=request.frames,
            python=".".join(map(str, sys.version_info[:3])),
            before=self._figures(),
            stopped_ms=[],
            since_seconds=seconds,
        )
        tracer.start(request.frames)
        self._request = request
        self._write({"state": "running"})

    def _look(self) -> None:
        now = self._clock()
        if not self._tracer.is_tracing():
            self._request = None
            self._write({"state": "ended", "why": "this process turned tracemalloc off"})
        elif self._tracer.get_tracemalloc_memory() > MAX_TRACER_BYTES:
            self._end(f"tracemalloc itself had more than {MAX_TRACER_BYTES >> 20} MiB")
        elif now >= self._until:
            self._end("its time is over")
        elif self._baseline is None and now >= self._baseline_due:
            self._baseline = dict(sorted(self._held().items(), key=lambda one: one[1][0], reverse=True)[:_MAX_BASELINE])
            self._result["since_seconds"] = round(self._until - now, 1)

    def _end(self, why: str) -> None:
        traced = self._tracer.get_tracemalloc_memory()
        held, before = self._held(), self._baseline or {}
        self._request, self._baseline = None, None
        self._stop()
        grown = _grown(before, held)
        del held
        early = max(0.0, self._until - self._clock())
        self._result["since_seconds"] = round(max(0.0, self._result["since_seconds"] - early), 1)
        self._write(
            {
                "state": "ended",
                "why": why,
                "ended": round(self._wall_clock(), 3),
                "after": self._figures(),
                "tracer_bytes": traced,
                "grown_bytes": sum(size for _, size, _ in grown),
                "lines": [_line(*row) for row in grown[:MAX_LINES]],
            }
        )

    def _held(self) -> dict[Any, tuple[int, int]]:
        """Return the bytes and pieces held for each stack of lines, innermost first."""
        started = time.perf_counter()
        snapshot = self._tracer.take_snapshot()
        self._result["stopped_ms"].append(round((time.perf_counter() - started) * 1000, 1))
        held = {}
        for row in snapshot.statistics("traceback"):
            frames = tuple((frame.filename, frame.lineno) for frame in reversed(row.traceback))
            # A reading allocates too. Our wrappers of the engine's methods are callers of what may leak.
            innermost = frames[0][0]
            is_own = innermost.startswith(_OWN) or innermost == getattr(self._tracer, "__file__", None)
            if not (is_own or any(file == __file__ for file, _ in frames)):
                held[frames] = (row.size, row.count)
        return held

    def _stop(self) -> None:
        tracer = self._tracer
        tracer.clear_traces()
        self._pause(_YIELD_SECONDS)
        tracer.stop()

    def _figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        with suppress(OSError):
            figures = read_figures("self", self._root)
        known = {name: value for name, value in figures.items() if name in ("anonymous_bytes", "threads")}
        return {"malloc": read_malloc(), **known}

    def _failed(self, error: Exception) -> None:
        with suppress(Exception):
            if self.is_running:
                self._request = self._baseline = None
                if self._tracer.is_tracing():
                    self._stop()
            if self._stem:  # else this process does not know its own name yet
                self._write({"state": "failed", "why": describe(error)})

    def leave(self) -> None:
        """End a trace that this process was forked with: the file is the parent's, and no other thread is here."""
        if self.is_running:
            self._request = None
            with suppress(Exception):
                self._tracer.stop()

    def close(self) -> None:
        """Turn tracemalloc off without a reading, which would hold up a process that ends."""
        if self.is_running:
            self._request = self._baseline = None
            with suppress(Exception):
                self._stop()
            with suppress(Exception):
                self._write({"state": "ended", "why": "the process, or what it writes of itself, ended"})

    def _write(self, change: dict[str, Any]) -> None:
        self._result.update(change)
        whole = {
            "schema": 1,
            "boot_id": boot_id(self._root),
            "pid": os.getpid(),
            "started": pid_started(self._root),
            **self._result,
        }
        body = encoded(whole)
        while len(body) > MAX_RESULT_BYTES and whole.get("lines"):
            whole["lines"] = whole["lines"][:-1]
            body = encoded(whole)
        with new_file(Path(self._stem + RESULT_SUFFIX), _READABLE_BY_ALL) as descriptor:
            os.write(descriptor, body[:MAX_RESULT_BYTES])
        os.close(descriptor)


def _has_python_lock() -> bool:
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return enabled()


def _grown(before: dict[Any, tuple[int, int]], after: dict[Any, tuple[int, int]]) -> list[tuple[Any, int, int]]:
    """Return the stacks that hold more than before, the most first: frames, bytes, pieces."""
    grown = []
    for frames, (size, count) in after.items():
        old_size, old_count = before.get(frames, (0, 0))
        if size > old_size:
            grown.append((frames, size - old_size, count - old_count))
    return sorted(grown, key=lambda one: one[1], reverse=True)


def _line(frames: Any, size: int, count: int) -> dict[str, Any]:  # noqa: ANN401 - pairs of file and line
    (file, line), *callers = frames
    shown = {"file": _end_of(file), "line": line, "bytes": size, "count": count}
    return {**shown, "callers": [f"{_end_of(path, 60)}:{number}" for path, number in callers[:3]]}


def _end_of(path: str, most: int = _MAX_FILE) -> str:
    whole = printable(path, 4 * _MAX_FILE)
    return whole if len(whole) <= most else "..." + whole[3 - most :]
