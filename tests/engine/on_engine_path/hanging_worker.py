"""A worker extension that makes a step hang. For one test alone; the engine finds it by its folder."""

from __future__ import annotations

import ctypes

from highwater_worker import MemoryExtension


class HangingWorker(MemoryExtension):
    """Highwater's extension, and one method that prepares a hang."""

    def hang_in_next_step(self, seconds: int) -> str:
        """Have the next step hold Python's lock in the C library for so long."""
        runner = self.model_runner  # type: ignore[attr-defined]  # the worker's, where vLLM adds us
        execute_model = runner.execute_model

        def hold_the_lock(*arguments: object, **named: object) -> object:
            del runner.execute_model
            ctypes.PyDLL(None).sleep(seconds)  # with the lock, as a C extension that forgot to let go of it
            return execute_model(*arguments, **named)

        runner.execute_model = hold_the_lock
        return "ready"
