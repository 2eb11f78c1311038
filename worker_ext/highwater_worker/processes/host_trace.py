"""A trace of this process's Python memory, on request: which lines hold more at its end than a while before.

Nothing happens until a request lies in the recorders' folder: `tick` costs one look at the folder then. Everything of a
trace is done by the thread that calls `tick`, and by no other. The trace ends when its time is over, on request, or
when what tracemalloc itself keeps passes `MAX_TRACER_BYTES`. A process that uses tracemalloc by itself is left alone.

Ending it: in CPython before 3.12.9 and 3.13.2 `tracemalloc.stop` can crash a thread that is about to note an
allocation without holding Python's lock (https://github.com/python/cpython/issues/128679). Such a thread waits for that
lock. So the traces are dropped first, which takes long; then the lock is given up for a moment, so that whoever waits
is served; then `stop`, with nothing left to drop, takes microseconds. No reading is under way meanwhile.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from highwater_worker.errors import describe, printable
from highwater_worker.identity import pid_started
from highwater_worker.new_file import new_file
from highwater_worker.processes.figures import read_figures
from highwater_worker.processes.malloc_figures import read_malloc
from highwater_worker.processes.trace_request import SUFFIX, BadRequestError, TraceRequest, read_request
from highwater_worker.recorder.bodies import encoded
from highwater_worker.recorder.identity import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

RESULT_SUFFIX = ".trace.json"
MAX_TRACER_BYTES = 128 << 20
MAX_RESULT_BYTES = 4096
MAX_LINES = 12
_BASELINE_SHARE = 0.25
_MAX_BASELINE = 20_000
_MAX_FILE = 110
_READABLE_BY_ALL = 0o644
_OLD_SECONDS = 86_400.0
_MAX_LOOKED_AT = 1024
_YIELD_SECONDS = 0.02
_OWN = str(Path(__file__).resolve().parents[1])


class HostTrace:
    """One process's traces, one at a time.

    Args:
        folder: The recorders'.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        root: The file system's root; a test brings its own.
        tracer: In the place of the module tracemalloc, which is imported when it is first needed.
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
        """Whether a trace is under way."""
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
        if request is not None and (request.action == "stop" or not self.is_running):
            self._asked(request)
        elif self.is_running:  # a second request is for nobody: the file of the first says what goes on
            self._look()

    def _asked(self, request: TraceRequest) -> None:
        if request.action == "stop":
            if self.is_running:
                self._end("it was asked to stop")
        else:
            self._begin(request)

    def _begin(self, request: TraceRequest) -> None:
        tracer = self._tracer = self._tracer or import_module("tracemalloc")
        self._result = {"id": request.id}
        if not _has_python_lock():
            self._write({"state": "refused", "why": "this Python runs without its lock: tracemalloc may crash there"})
            return
        if tracer.is_tracing():
            self._write({"state": "refused", "why": "this process uses tracemalloc itself, and is left alone"})
            return
        self._remove_old()
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
                "lines": [_line(*one) for one in grown[:MAX_LINES]],
            }
        )

    def _held(self) -> dict[Any, tuple[int, int]]:
        """Return what is held, as bytes and pieces for each stack of lines, innermost first."""
        started = time.perf_counter()
        snapshot = self._tracer.take_snapshot()
        self._result["stopped_ms"].append(round((time.perf_counter() - started) * 1000, 1))
        found = {}
        for one in snapshot.statistics("traceback"):
            frames = tuple((frame.filename, frame.lineno) for frame in reversed(one.traceback))
            # A reading allocates too. Our wrappers of the engine's methods are callers of what may leak.
            innermost = frames[0][0]
            is_own = innermost.startswith(_OWN) or innermost == getattr(self._tracer, "__file__", None)
            if not (is_own or any(file == __file__ for file, _ in frames)):
                found[frames] = (one.size, one.count)
        return found

    def _stop(self) -> None:
        tracer = self._tracer
        tracer.clear_traces()
        self._pause(_YIELD_SECONDS)
        tracer.stop()

    def _figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {"malloc": read_malloc()}
        with suppress(OSError):
            figures = read_figures("self", self._root)
            found.update({name: figures[name] for name in ("anonymous_bytes", "threads") if name in figures})
        return found

    def _failed(self, error: Exception) -> None:
        with suppress(Exception):
            if self.is_running:
                self._request, self._baseline = None, None
                if self._tracer.is_tracing():
                    self._stop()
            if not self._stem:
                return  # this process does not know its own name yet
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

    def _remove_old(self) -> None:
        """Remove the results of a day ago."""
        before = self._wall_clock() - _OLD_SECONDS
        with suppress(OSError), os.scandir(self._folder) as entries:
            for number, entry in enumerate(entries):
                if number >= _MAX_LOOKED_AT:
                    return
                with suppress(OSError):
                    is_ours = entry.name.startswith("highwater-") and entry.name.endswith(RESULT_SUFFIX)
                    if is_ours and entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.path)


def _has_python_lock() -> bool:
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return enabled()


def _grown(before: dict[Any, tuple[int, int]], after: dict[Any, tuple[int, int]]) -> list[tuple[Any, int, int]]:
    """Return what holds more than before, the most first: frames, bytes, pieces."""
    found = []
    for frames, (size, count) in after.items():
        old_size, old_count = before.get(frames, (0, 0))
        if size > old_size:
            found.append((frames, size - old_size, count - old_count))
    return sorted(found, key=lambda one: one[1], reverse=True)


def _line(frames: Any, size: int, count: int) -> dict[str, Any]:  # noqa: ANN401 - pairs of file and line
    (file, line), *callers = frames
    shown = {"file": _end_of(file), "line": line, "bytes": size, "count": count}
    return {**shown, "callers": [f"{_end_of(path, 60)}:{number}" for path, number in callers[:3]]}


def _end_of(path: str, most: int = _MAX_FILE) -> str:
    whole = printable(path, 4 * _MAX_FILE)
    return whole if len(whole) <= most else "..." + whole[3 - most :]
