"""Writes every thread's stack into the recorder's file once no Python thread of the process could run for a while.

That is a hang which holds Python's lock, and this is the only one that sees it: `faulthandler`'s timer is a thread of
the C library's that needs no lock. It is moved on by the recorder's thread and never armed for a step: its dump reads
other threads' frames while they run, which can end the process with a segmentation fault (tried with threads that make
and drop functions all the time: after 13 dumps on CPython 3.12.1, 59 on 3.13.0), and is harmless where none can run. A
process that was itself held for longer, by a debugger or a frozen container, is dumped once as it goes on.

There is one such timer in a process, and no way to find out whether it is in use. Ours gives way for good as soon as
other code calls for it while the recorder runs, and is not used at all under pytest with its own timer's plugin.
Code that armed it before us loses it: vLLM uses none (0.12.0, 0.23.0, 0.27.0 and 0.32.0 searched).

It is stopped before a fork. A child would have it armed without its thread, and stopping it then, as Python itself does
at the child's end, waits for that thread for ever.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from highwater_worker.recorder.ring import Ring

SECONDS = 4.0
_PUSH_SECONDS = 1.0
"""The time between two moves of the timer: each ends a thread and starts one, about 80 us with Python's lock held."""
_NAMES = ("dump_traceback_later", "cancel_dump_traceback_later")
GIVES_WAY = "other code uses faulthandler's timer: a hang that holds Python's lock will show no stack"


def is_timer_taken() -> bool:
    """Return whether other code is known to use the timer in this process."""
    return "_pytest.faulthandler" in sys.modules


_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""The watchdogs whose timers are stopped for a fork."""


class Watchdog:
    """The timer of one recorder; used by the recorder's thread.

    Args:
        ring: The file for the stack.
        gives_way: Whether the timer is never used.
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
        """Move the timer on, now and then.

        Args:
            now: Monotonic seconds.

        Raises:
            OSError: The file cannot be written.
        """
        if self.gives_way or now < self._due:
            return
        self._due = now + _PUSH_SECONDS
        self._originals["cancel_dump_traceback_later"]()
        descriptor = self._ring.clear_stack(now, SECONDS)
        if not (self.gives_way or self._is_forking):  # another thread may have come in between
            self._originals["dump_traceback_later"](SECONDS, file=descriptor)

    def stop(self) -> None:
        """Stop the timer, if it is still ours, and put back the functions of `faulthandler`."""
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
        """Stop the timer until `after_fork`."""
        self._is_forking = True
        if not self.gives_way:
            self._originals["cancel_dump_traceback_later"]()

    def after_fork(self) -> None:
        """Let it be moved on again soon."""
        self._is_forking = False
        self._due = float("-inf")

    def _noticing(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def noticing(*arguments: Any, **named: Any) -> None:  # noqa: ANN401 - the function's own
            self.gives_way = True
            original(*arguments, **named)

        return noticing


def _before_fork() -> None:
    for watchdog in list(_running):
        watchdog.before_fork()


def _after_fork_in_parent() -> None:
    for watchdog in list(_running):
        watchdog.after_fork()


def _after_fork_in_child() -> None:
    for watchdog in list(_running):
        watchdog.leave()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
