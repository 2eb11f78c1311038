"""Waits for the asynchronous outputs of steps, timed.

With asynchronous scheduling a step returns before the device is done with it. Then not the step hangs, but
`get_output()` of the object that it returned, in a thread of its own (vllm 0.32.0
v1/executor/multiproc_executor.py:998, `enqueue_output`, in `async_output_busy_loop`) or wherever the engine waits (vllm
0.32.0 v1/executor/uniproc_executor.py:44). It refuses to keep an output alive, and to change what `get_output` takes,
returns or raises.
"""

from __future__ import annotations

import time
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Wait(NamedTuple):
    """A thread that waits for an output."""

    since: float
    thread: int


class Outputs:
    """Watches the outputs that steps return.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[int, float] = {}
        self._watched: dict[type, type | None] = {}

    def watch(self, output: object) -> None:
        """Notice waits for this output, if it is one that can be waited for.

        The object gets a subclass of its class. Its own `get_output` cannot be replaced on it: an attribute that holds
        the object keeps it, and what it has on the device, until the garbage collector runs; one that does not hold it
        finds it gone, for the engine may pass `output.get_output` on and drop the output (vllm 0.12.0
        v1/executor/uniproc_executor.py:82).
        """
        kind = type(output)
        try:
            watched = self._watched[kind]
        except KeyError:
            watched = self._watched[kind] = self._subclass(kind)
        if watched is not None:
            try:
                output.__class__ = watched
            except TypeError:  # its memory is laid out otherwise, as that of a class written in C may be
                self._watched[kind] = None

    def oldest(self) -> Wait | None:
        """Return the longest wait, None without one."""
        # One call that takes all of it: other threads come and go meanwhile.
        waits = [Wait(since, thread) for thread, since in list(self._waiting.items())]
        return min(waits, default=None)

    def _subclass(self, kind: type) -> type | None:
        method: Any = getattr(kind, "get_output", None)
        if not callable(method):
            return None
        waiting, clock = self._waiting, self._clock

        def get_output(output: object, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
            thread = get_ident()
            is_outermost = thread not in waiting
            if is_outermost:
                waiting[thread] = clock()
            try:
                return method(output, *arguments, **named)
            finally:
                if is_outermost:
                    waiting.pop(thread, None)

        names = {
            "__slots__": (),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "get_output": get_output,
        }
        try:
            return type(kind)(kind.__name__, (kind,), names)
        except Exception:  # noqa: BLE001 - a class that cannot be inherited from is left alone: its waits are not seen
            return None
