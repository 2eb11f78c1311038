"""Stacks of all threads while something takes long; the engine's own, by a signal, where no other thread can run.

The recorder's dump is `faulthandler.dump_traceback`, which allocates nothing and holds Python's lock, so that no frame
that it reads moves. `sys._current_frames` allocates: on CPython 3.11 before 3.11.12 that can stop the whole process for
good (python/cpython issue 106883).
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import re
import signal
import threading
import time

from highwater_worker.wire import Ring

LONG_SECONDS = 1.0  # a call that has lasted for so long gets a stack
_LONGEST_SECONDS = 30.0
_MAX_DUMP_BYTES = 256 * 1024
_MAX_CHARACTERS = 12_000
_LOOK_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 1.0
_MAX_NAME = 100

SECONDS = 4.0
_PUSH_SECONDS = 1.0
_SIGEV_THREAD_ID = 4  # timer_create(2)
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


class _Event(ctypes.Structure):
    """`struct sigevent`, as Linux has it: 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: the interval, 0 for none, and the time until the signal."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("interval", "interval_ns", "seconds", "ns"))


_signal: int | None = None  # of this process: the handler stays, for a signal without one ends a process


def _chosen_signal() -> int:
    """Return the last real-time signal that nothing here handles, ignores or blocks. Raises OSError: none is free."""
    with open("/proc/self/status", encoding="ascii") as file:  # C code's handlers too, which `signal.getsignal` lacks
        taken = [int(line.split()[1], 16) for line in file if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:"))]
    free = [
        one for one in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if not any(mask >> one - 1 & 1 for mask in taken)
    ]
    if not free:
        raise OSError("every real-time signal is in use")
    return free[-1]


@functools.cache
def _library() -> ctypes.PyDLL:
    """Return the C library that has timers: before glibc 2.34 they have one of their own. Raises OSError: none."""
    library = ctypes.PyDLL(None, use_errno=True)
    return library if hasattr(library, "timer_create") else ctypes.PyDLL("librt.so.1", use_errno=True)


@functools.cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class Watchdog:
    """Has the kernel interrupt the engine's thread, which then writes its stack into the file, if no other can run.

    That is a hang which holds Python's lock, and nothing else sees it. `faulthandler` writes the stack in the signal's
    handler, which needs no lock, and of that thread only, which stands still meanwhile. Its own timer is not for us:
    it reads the frames of running threads where a process goes on after it was held, by a debugger or a frozen
    container, and that ends the process (5 of 700 such stops with threads that make and drop functions all the time, on
    CPython 3.11.7, 3.12.1 and 3.13.0; none of 700 with this signal).

    The signal comes where the recorder's thread has not run for `SECONDS`. It ends some system calls early (EINTR); the
    kernel begins most of them again, since `faulthandler` sets SA_RESTART. No child of a fork has the timer.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._due = float("-inf")
        self._timer: ctypes.c_void_p | None = None

    def start(self) -> None:
        """Raises OSError: there is no such timer here, and a hang that holds Python's lock will show no stack."""
        global _signal  # noqa: PLW0603 - one for all recorders that a process has in turn
        number, timer = _signal or _chosen_signal(), ctypes.c_void_p()
        event = _Event(None, number, _SIGEV_THREAD_ID, threading.main_thread().native_id or 0, b"")
        faulthandler.register(number, file=self._ring.clear_stack(time.monotonic(), SECONDS), all_threads=False)
        _signal = number
        if _library().timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._timer = timer
        self._set()

    def push(self, now: float) -> None:
        """Move the timer on, once a second; an OSError says that the file cannot be written."""
        if self._timer is None or now < self._due:
            return
        self._due = now + _PUSH_SECONDS
        self._set()
        self._ring.clear_stack(now, SECONDS)

    def _set(self) -> None:
        times = _Times(0, 0, int(SECONDS), round(SECONDS % 1 * 1e9))
        _library().timer_settime(self._timer, 0, ctypes.byref(times), None)

    def stop(self) -> None:
        """Stop the timer before the file is closed; a signal that is on its way writes nowhere."""
        timer, self._timer = self._timer, None
        if timer is not None and _signal is not None:
            _library().timer_delete(timer)
            faulthandler.register(_signal, file=_nowhere(), all_threads=False)
