"""The life of a thread that writes a file: it ends with its process or before, and never holds that process's end."""

from __future__ import annotations

import atexit
import os
from multiprocessing.util import Finalize
from threading import Event, Thread

_STOP_SECONDS = 1.0  # the time that an end waits for the thread, which the disk may hold
NOT_ENDED = "has not ended within a second: the disk holds its thread, and it ends once let go"
_EARLY = 100
"""Above every priority that multiprocessing gives its own finalizers: they take down things still read here."""


class Writer:
    """A file's writer, whose `run` is the body of its thread and returns soon after `end`.

    A forked child of its process has the object and no thread.
    """

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._name = name
        self._stopped = Event()
        self._thread: Thread | None = None
        self._finalizer: Finalize[bool] | None = None

    def run(self) -> None:
        raise NotImplementedError

    def start_thread(self) -> None:
        """Raises RuntimeError where no thread can be started."""
        # A daemon: a thread that the disk holds must not hold the interpreter's end.
        thread = Thread(target=self.run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def end_with_process(self) -> None:
        # vLLM's processes are mostly multiprocessing's children, which run its finalizers, and `atexit` only where they
        # were spawned, not forked.
        atexit.register(self.end)
        self._finalizer = Finalize(None, self.end, exitpriority=_EARLY)

    def forget_process(self) -> None:
        """Undo `end_with_process`, whose lists keep this object."""
        atexit.unregister(self.end)
        if self._finalizer is not None:
            self._finalizer.cancel()

    def is_running(self) -> bool:
        return self._thread is not None and self.pid == os.getpid() and self._thread.is_alive()

    def end(self) -> bool:
        """End the thread, and return whether it has ended: one that the disk holds ends once it is let go."""
        self._stopped.set()
        if self._thread is None or not self.is_running():
            return True
        self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()
