"""How many steps a worker has begun and ended, counted where the engine calls them.

The engine calls `worker.execute_model` by name, under its uniproc, multiproc and second Ray executor alike
(vllm/v1/worker/worker_base.py, `WorkerWrapperBase`), so that an attribute of the worker's own comes before its class's
method. It refuses to change what a call takes, returns or raises.
"""

from __future__ import annotations

import functools
import time
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from worker_ext.attributes import look_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_ext.notes import Notes

_STEP = "execute_model"
# The second call of a step in engines that have it, and the step that a replica takes without requests so that the
# others need not wait for it (vllm/v1/engine/core.py, `step`, `execute_dummy_batch`). Time in them is time in a step.
_PARTS = ("sample_tokens", "execute_dummy_batch")


class Progress(NamedTuple):
    """What was seen of the steps up to now."""

    begun: int
    ended: int
    since: float | None
    """When the call that is running began, None outside of one."""
    last: float | None
    """When a call began or ended last, None before the first."""
    thread: int
    """The thread that ran the last one."""


class Steps:
    """Counts one worker's steps while it is attached.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # One tuple, put in place by one statement: whoever reads it meanwhile has all of it old or all of it new.
        self._seen: tuple[int, int, float | None, float | None, int] = (0, 0, None, None, 0)
        self._put: dict[str, tuple[Any, Any]] = {}
        self._passed_by = False

    def attach(self, worker: Any, notes: Notes) -> None:  # noqa: ANN401 - vLLM's worker, of any version
        """Count from now on.

        Args:
            worker: The worker.
            notes: Gets why steps cannot be counted.
        """
        for name in (_STEP, *_PARTS):
            method = getattr(worker, name, None)
            if not callable(method):
                continue
            counting = self._counting(method, int(name == _STEP))
            before = vars(worker).get(name)
            setattr(worker, name, counting)
            self._put[name] = (counting, before)
        if _STEP not in self._put:
            notes.add("moving.steps_begun", f"the worker has no {_STEP}: its steps cannot be counted")
        # Ray's first executor runs steps on the runner, past the worker (vllm/v1/executor/ray_utils.py,
        # `execute_model_ray`): that none was seen means nothing there.
        backend = look_up(worker, "vllm_config", "parallel_config", "distributed_executor_backend")
        self._passed_by = "ray" in str(backend).lower()

    def detach(self, worker: Any) -> None:  # noqa: ANN401 - as above
        """Put back what was there; what somebody else has put over ours since stays, with ours inside."""
        for name, (counting, before) in self._put.items():
            if vars(worker).get(name) is not counting:
                continue
            if before is None:
                delattr(worker, name)
            else:
                setattr(worker, name, before)
        self._put = {}

    def progress(self) -> Progress | None:
        """Return what was seen, None where steps cannot be seen."""
        if _STEP not in self._put or (self._passed_by and not self._seen[0]):
            return None
        return Progress(*self._seen)

    def _counting(self, method: Callable[..., Any], step: int) -> Callable[..., Any]:
        clock = self._clock

        @functools.wraps(method)
        def counting(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
            begun, ended, outer, _, _ = self._seen
            now = clock()
            self._seen = (begun + step, ended, now, now, get_ident())
            try:
                return method(*arguments, **named)
            finally:
                # Read again: a call within this one has moved them. Around that one, this one goes on.
                begun, ended, _, _, thread = self._seen
                self._seen = (begun, ended + step, outer, clock(), thread)

        return counting
