"""The two logs of requests: warnings at a bounded rate, and the access log.

The access log has one JSON object per line for each request that ended, written by a thread of its own. A line has no
query, no header but the request's id, and nothing of a body. The event loop only puts a value into a bounded queue;
where the disk, or the reader of standard output, is slower than the traffic, lines are dropped and counted, and no
request waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from gated_proxy.heads import RequestHead
from gated_proxy.traffic import Result

STANDARD_OUTPUT = "-"
QUEUE_LINES = 10_000
# The time to write the queue at the end; the remaining lines are lost.
CLOSE_SECONDS = 2.0
_PRECISION = 6  # digits of a second
LOGGED_CHARACTERS = 200

log = logging.getLogger("highwater.access_log")


def printable(text: bytes | str) -> str:
    """Return a client's text fit for one line of a log: cut, and with escapes for all but printable ASCII."""
    cut = text[:LOGGED_CHARACTERS]
    shown = cut.decode("latin-1") if isinstance(cut, bytes) else cut
    escaped = shown.encode("unicode_escape").decode("ascii")
    return escaped if len(text) <= LOGGED_CHARACTERS else f"{escaped}..."


class LimitedLog:
    """Passes a few lines per kind and period on to a logger; the next period's first line counts those left out."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        lines: int = 5,
        period_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._lines = lines
        self._period_seconds = period_seconds
        self._clock = clock
        self._periods: dict[str, tuple[float, int]] = {}  # kind: (start of its period, lines seen in it)

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        """Log a line of a kind, of a bounded set, at its rate; a client's argument must go through ``printable``."""
        now = self._clock()
        start, seen = self._periods.get(kind, (float("-inf"), 0))
        if now - start >= self._period_seconds:
            if seen > self._lines:
                left_out = seen - self._lines
                self._logger.warning("%d more lines of kind %s were left out in the last period", left_out, kind)
            start, seen = now, 0
        self._periods[kind] = (start, seen + 1)
        if seen < self._lines:
            self._logger.warning(message, *arguments)


class RequestRecord:
    """The figures of one request, which grow until it ends; ``started`` is by ``time.perf_counter``.

    What does not apply, or was not known when the request ended, is None; the head is empty where it could not be read.
    """

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.started = time.perf_counter()
        self.status: int | None = None
        self.result: Result = "complete"
        # As in ``highwater_proxy_refused_total`` or ``highwater_proxy_upstream_errors_total``; None: it is complete.
        self.reason: str | None = None
        self.request_bytes = 0  # of the body alone
        self.response_bytes = 0
        self.first_byte_seconds: float | None = None
        self.held_seconds = 0.0  # the time that it waited at the gate and at the door
        self.was_reused: bool | None = None  # the connection to the engine

    def note_first_byte(self) -> None:
        self.first_byte_seconds = time.perf_counter() - self.started

    def line(self, peer: str, path_class: str | None, status: int, seconds: float) -> dict[str, object]:
        """Return its line of the access log.

        ``peer`` is the client's address and port, ``path_class`` as in the metrics (``sidecar`` for the sidecar's
        paths), ``status`` what the client saw: 499 if it left before.
        """
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "peer": peer,
            "method": printable(self.head.method) or None,
            "path": printable(self.head.path) or None,  # as sent, without the query
            "path_class": path_class,
            "status": status,
            "result": self.result,
            "reason": self.reason,
            "request_id": self.head.request_id().decode(),
            "request_bytes": len(self.head.raw) + self.request_bytes,
            "response_bytes": self.response_bytes,
            "duration_seconds": seconds,
            "time_to_first_byte_seconds": self.first_byte_seconds,
            "held_seconds": self.held_seconds,
            "engine_connection_reused": self.was_reused,
        }


class AccessLog:
    """Writes ended requests to a file, or to standard output (``-``); ``dropped`` counts the lines that it could not.

    The file is opened again once it was moved or removed, which is checked before each line and at ``reopen``. Raises
    OSError where it cannot be opened.
    """

    def __init__(self, where: str, *, queue_lines: int = QUEUE_LINES) -> None:
        self.dropped = 0
        self.is_file = where != STANDARD_OUTPUT
        self._path = Path(where).absolute()
        self._out: TextIO = self._opened() if self.is_file else sys.stdout
        self._limited = LimitedLog(log)
        self._lock = threading.Lock()
        self._is_closed = False
        # Lines, and without one what the writing thread is to do.
        self._queue: queue.Queue[Mapping[str, object] | Literal["reopen", "end"]] = queue.Queue(queue_lines)
        self._writing = threading.Thread(target=self._write_lines, daemon=True)
        self._writing.start()

    def write(self, line: Mapping[str, object] | Literal["reopen"]) -> None:
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._failed(line, "the queue is full")

    def reopen(self) -> None:
        """Open the file again if it was moved away, also while no line is to be written."""
        self.write("reopen")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        end = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put("end", timeout=CLOSE_SECONDS)
            self._writing.join(end - time.monotonic())

    def _failed(self, item: Mapping[str, object] | Literal["reopen"], why: str) -> None:
        with self._lock:  # called by the loop's thread and by the writing one
            if item != "reopen":
                self.dropped += 1
            self._limited.warning("access_log", "access log: cannot write (%s), lines dropped: %d", why, self.dropped)

    # --- in the thread that writes ---

    def _write_lines(self) -> None:
        while (item := self._queue.get()) != "end":
            try:
                if self.is_file and self._is_moved():
                    self._out.close()
                    self._out = self._opened()
                if item != "reopen":
                    shown = {k: round(v, _PRECISION) if isinstance(v, float) else v for k, v in item.items()}
                    self._out.write(f"{json.dumps(shown)}\n")
                    self._out.flush()
            except (OSError, ValueError) as exc:  # ValueError: standard output is closed
                self._failed(item, str(exc))  # a file that cannot be opened now is tried again at the next line
        if self.is_file:
            with contextlib.suppress(OSError):  # what a full disk did not take before
                self._out.close()

    def _is_moved(self) -> bool:
        if self._out.closed:
            return True
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        ours = os.fstat(self._out.fileno())
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _opened(self) -> TextIO:
        # Peers and paths are not for every user of the machine.
        opener = partial(os.open, mode=0o640)
        return open(self._path, "a", encoding="utf-8", opener=opener)
