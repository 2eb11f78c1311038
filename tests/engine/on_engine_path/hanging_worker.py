"""A worker extension that makes a step hang. For one test alone; the engine finds it by its folder."""

from __future__ import annotations

import ctypes
import time

from highwater_worker import MemoryExtension


class HangingWorker(MemoryExtension):
    """Highwater's extension, and one method that prepares a hang."""

    def hang_in_next_step(self, seconds: int) -> str:
        """Have the next step hold Python's lock in the C library for so long."""
        runner = self.model_runner  # type: ignore[attr-defined]  # the worker's, where vLLM adds us
        execute_model = runner.execute_model

        def hold_the_lock(*arguments: object, **named: object) -> object:
            del runner.execute_model
            # With the lock, as a C extension that forgot to let go of it; no signal ends this one early.
            until = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_timedlock(mutex, until)
            return execute_model(*arguments, **named)

        runner.execute_model = hold_the_lock
        return "ready"
