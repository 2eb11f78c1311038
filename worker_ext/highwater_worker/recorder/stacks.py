"""Stacks of all threads while something takes long, by the recorder's thread.

A dump is `faulthandler.dump_traceback`, which allocates nothing and holds Python's lock, so that no frame that it reads
moves. `sys._current_frames` allocates: on CPython 3.11 before 3.11.12 that can stop the whole process for good
(python/cpython issue 106883).

A call that holds Python's lock holds up this thread too, and leaves no stack. What `faulthandler` could do without the
lock can end a healthy process with a segmentation fault, where it goes on after a debugger or a frozen container held
it: its timer reads the frames of threads that run, and in a signal's handler a thread's own may be half changed.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys

LONG_SECONDS = 1.0  # a call that has lasted for so long gets a stack
_LONGEST_SECONDS = 30.0
_MAX_DUMP_BYTES = 256 * 1024
_MAX_CHARACTERS = 12_000
_LOOK_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 1.0
_MAX_NAME = 100

_FRAME = re.compile(r'  File ".*", line [0-9]+ in (.*)')
# The functions by which the engine's loop calls a worker's methods, then the loop itself, in versions where it calls
# them directly (vllm 0.32.0 v1/executor/multiproc_executor.py:1055, `_execute_worker_rpc`); where engine and worker are
# one process, the function in the middle (vllm 0.32.0 v1/serial_utils.py:508, `run_method`).
_CALLERS = ("_execute_worker_rpc", "run_method", "worker_busy_loop")
# Their other calls: waiting for the next call, handing over the last one's result.
_NO_CALLS = frozenset({"dequeue", "handle_output", "enqueue_output", "_execute_worker_rpc"})
# Wrappers around the method: torch's decorators, and this recorder's wrappers.
_AROUND = frozenset({"decorate_context", "_fn", "change", "part", "execute_model"})


class Stacks:
    """Takes dumps while a call lasts: after one second, two, four and so on, then every half a minute."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._since: float | None = None
        self._due = 0.0
        self._text: str | None = None
        self._call: tuple[str, float] | None = None
        self._call_due = float("-inf")

    def look(self, since: float | None, thread: int, now: float) -> str | None:
        """Return the last dump of the call that has lasted for longest, `thread` first; None where none lasts.

        Times are monotonic seconds; `since` is None without a call. Raises OSError where no dump can be taken here.
        """
        if since != self._since:
            self._since, self._text, self._due = since, None, (since or 0.0) + LONG_SECONDS
        if since is not None and now >= self._due:
            self._due = now + min(max(now - since, LONG_SECONDS), _LONGEST_SECONDS)
            self._text = ordered(self._dump(), thread)
        return self._text

    def look_for_call(self, thread: int, now: float) -> tuple[str, float] | None:
        """Return the call that the engine runs on a thread beside steps and operations, and a time since which it runs.

        A dump holds up every thread for a millisecond or so: one is taken every five seconds, and every second while
        something was found. Raises OSError where none can be taken here.
        """
        if now >= self._call_due:
            name = call_of(ordered(self._dump(), thread))
            before = self._call
            self._call = None if name is None else before if before and before[0] == name else (name, now)
            self._call_due = now + (_LOOK_SECONDS if name is None else _LOOK_AGAIN_SECONDS)
        return self._call

    def forget_call(self) -> None:
        """Look anew the next time: something else has begun."""
        self._call, self._call_due = None, float("-inf")

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _dump(self) -> str:
        if sys.version_info[:3] == (3, 13, 0):  # python/cpython issue 123967
            raise OSError("faulthandler of CPython 3.13.0 may end the process")
        if self._descriptor < 0:
            # In memory: the dump is written with Python's lock held, for which no disk may be waited.
            self._descriptor = os.memfd_create("highwater-stacks", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file=self._descriptor, all_threads=True)
        return os.pread(self._descriptor, _MAX_DUMP_BYTES, 0).decode("ascii", "replace")


def ordered(dump: str, thread: int) -> str:
    mark = f"0x{thread:016x}"
    parts = dump.split("\n\n")
    parts.sort(key=lambda part: mark not in part.partition("\n")[0])
    return "\n\n".join(parts)[:_MAX_CHARACTERS]


def call_of(dump: str) -> str | None:
    """Return the worker's method that the loop in the dump's first part has called; None: it waits, or is unseen."""
    part = dump.partition("\n\n")[0]
    names = [match.group(1) for match in map(_FRAME.fullmatch, part.splitlines()) if match]
    caller = next((names.index(name) for name in _CALLERS if name in names), 0)
    called = [name for name in reversed(names[:caller]) if name not in _AROUND]
    return called[0][:_MAX_NAME] if called and called[0] not in _NO_CALLS else None
