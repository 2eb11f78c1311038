"""Stacks of all threads while something takes long: by the recorder's thread, or by a timer where it cannot run.

The thread's dump is `faulthandler.dump_traceback`, which allocates nothing and holds Python's lock, so that no frame
that it reads moves. `sys._current_frames` allocates: on CPython 3.11 before 3.11.12 that can stop the whole process for
good (python/cpython issue 106883).
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

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
"""The time between two moves of the timer: each ends a thread and starts one, about 80 us with Python's lock held."""
_NAMES = ("dump_traceback_later", "cancel_dump_traceback_later")
GIVES_WAY = "other code uses faulthandler's timer: a hang that holds Python's lock will show no stack"
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


def is_timer_taken() -> bool:
    return "_pytest.faulthandler" in sys.modules


_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()  # the watchdogs whose timers are stopped for a fork


class Watchdog:
    """Has `faulthandler`'s timer write every thread's stack into the file while no Python thread can run.

    That is a hang which holds Python's lock, and nothing else sees it: the timer is a thread of the C library's that
    needs no lock. The recorder's thread moves it on. It is never armed for a step: its dump reads other threads' frames
    while they run, which can end the process with a segmentation fault (tried with threads that make and drop functions
    all the time: after 13 dumps on CPython 3.12.1, 59 on 3.13.0), and is harmless where none can run. A process that
    was itself held for longer, by a debugger or a frozen container, is dumped once as it goes on.

    A process has one such timer, and does not show whether it is in use. This class gives way for good as soon as other
    code calls for it while the recorder runs, and is not used under pytest with its own timer's plugin. Code that armed
    it before loses it: vLLM uses none (0.12.0, 0.23.0, 0.27.0 and 0.32.0 searched).

    It is stopped before a fork. A child would have it armed without its thread, and stopping it then, as Python itself
    does at the child's end, never returns.
    """

    def __init__(self, ring: Ring, *, gives_way: bool = False) -> None:
        self._ring = ring
        self._due = float("-inf")
        self._originals: dict[str, Callable[..., None]] = {}
        self._wrappers: dict[str, Callable[..., None]] = {}
        self._is_forking = False
        self.gives_way = gives_way

    def start(self) -> None:
        """Notice other uses of the timer from now on."""
        for name in _NAMES:
            original = getattr(faulthandler, name, None)
            if original is None:  # a build of Python without it
                self.gives_way = True
            elif not self.gives_way:
                self._originals[name] = original
                self._wrappers[name] = self._noticing(original)
                setattr(faulthandler, name, self._wrappers[name])
        if not self.gives_way:
            _running.add(self)

    def push(self, now: float) -> None:
        """Move the timer on, once a second; an OSError says that the file cannot be written."""
        if self.gives_way or now < self._due:
            return
        self._due = now + _PUSH_SECONDS
        self._originals["cancel_dump_traceback_later"]()
        descriptor = self._ring.clear_stack(now, SECONDS)
        if not (self.gives_way or self._is_forking):  # another thread may have come in between
            self._originals["dump_traceback_later"](SECONDS, file=descriptor)

    def stop(self) -> None:
        """Stop the timer, if no other code uses it, and put back the functions of `faulthandler`."""
        if not self.gives_way and self._originals:
            self._originals["cancel_dump_traceback_later"]()
        self.leave()

    def leave(self) -> None:
        """Put back the functions of `faulthandler`, and never touch the timer again."""
        _running.discard(self)
        self.gives_way = True
        for name, wrapper in self._wrappers.items():
            if getattr(faulthandler, name, None) is wrapper:
                setattr(faulthandler, name, self._originals[name])
        self._wrappers = {}

    def before_fork(self) -> None:
        self._is_forking = True
        if not self.gives_way:
            self._originals["cancel_dump_traceback_later"]()

    def after_fork(self) -> None:
        self._is_forking = False
        self._due = float("-inf")

    def _noticing(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def noticing(*arguments: Any, **named: Any) -> None:  # noqa: ANN401 - the function's own
            self.gives_way = True
            original(*arguments, **named)

        return noticing


def _each(work: Callable[[Watchdog], None]) -> Callable[[], None]:
    def hook() -> None:
        for watchdog in list(_running):
            work(watchdog)

    return hook


_before_fork, _after_fork_in_parent = _each(Watchdog.before_fork), _each(Watchdog.after_fork)
_after_fork_in_child = _each(Watchdog.leave)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
