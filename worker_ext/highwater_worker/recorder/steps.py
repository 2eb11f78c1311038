"""The steps that a worker has begun and ended, counted where the engine calls them, and waits for their outputs.

The engine calls `worker.execute_model` by name, under its uniproc, multiproc and second Ray executor alike
(vllm 0.32.0 v1/worker/worker_base.py:370, `WorkerWrapperBase.execute_model`), so that an attribute of the worker's own
takes precedence over its class's method.

With asynchronous scheduling a step returns before the device is done with it. What hangs then is not the step, but
`get_output()` of the object that it returned, in a thread of its own (vllm 0.32.0
v1/executor/multiproc_executor.py:998, `enqueue_output`, in `async_output_busy_loop`) or wherever the engine waits (vllm
0.32.0 v1/executor/uniproc_executor.py:44).

Nothing here changes what a call takes, returns or raises, or keeps the worker or an output alive.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

from highwater_worker.engine_view import is_rays
from highwater_worker.errors import Notes
from highwater_worker.wrapping import unwrap_method, wrap_method

_STEP = "execute_model"
# The second call of a step in engines that have it, and the step that a replica takes without requests so that the
# others need not wait for it (vllm 0.32.0 v1/engine/core.py:743, vllm 0.32.0 v1/engine/core.py:1045). Time in them is
# time in a step.
_PARTS = ("sample_tokens", "execute_dummy_batch")
# Methods that change a worker's memory outside of steps; each may be missing (vllm 0.32.0
# v1/executor/abstract.py:376, vllm 0.32.0 v1/worker/gpu_worker.py:294, vllm 0.32.0 v1/worker/gpu_worker.py:332,
# vllm 0.32.0 v1/worker/gpu_worker.py:629, vllm 0.32.0 v1/worker/gpu_worker.py:1439, vllm 0.32.0
# v1/worker/gpu_worker.py:1550).
_CHANGES = (
    *("reset_encoder_cache", "reset_mm_cache", "sleep", "wake_up", "release_kv_cache_memory"),
    *("add_lora", "remove_lora", "reload_weights", "update_weights"),
)

_LOOKS = 8
"""Calls without tokens, one after the other, that are each followed by a sample: an engine that keeps several steps
under way ends its work with as many (vllm-ascend 0.30.0rc2 with two). While it waits for a connector it may run many
more, and the worker must not be held up by them."""


class Progress(NamedTuple):
    begun: int
    ended: int
    since: float | None  # the beginning of the call that is running, None outside of one
    last: float | None  # when a call began or ended last, None before the first
    thread: int  # that ran the last one


class Steps:
    """Counts one worker's steps while it is attached.

    `ended` is called after each call of the engine that returned, on its thread; its argument says whether the worker's
    memory must be sampled now: after the first calls without tokens, and after what changes memory outside of steps.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, ended: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._clock = clock
        self._on_end = ended
        self.outputs = Outputs(clock)
        self.calls = 0  # the number of calls of the engine that have begun, steps or other
        self.has_failed = False
        """True if the last call of a step raised: the engine dies of that, and may end its workers in order."""
        # Replaced by one statement: a reader has all of it old or all of it new.
        self._seen = Progress(0, 0, None, None, 0)
        # Weak references: the worker alone holds the wrappers, which may reach it.
        self._wrappers: dict[str, weakref.ref[Any]] = {}
        self._is_bypassed = False
        self._had_tokens = True  # of the last step: it says nothing before the first
        self._looks_left = _LOOKS  # of these, since the last step with tokens
        self.tokens_at = clock()  # when a step with tokens ended last; before the first one, the beginning

    @property
    def was_empty(self) -> bool | None:
        """True if the last step had no tokens, so that the engine has nothing to do; None where no step was seen."""
        return None if not self._seen.ended else not self._had_tokens

    def attach(self, worker: Any, notes: Notes) -> None:  # noqa: ANN401 - vLLM's worker, of any version
        """Count from now on; `notes` gets the reason where steps cannot be counted."""
        wrappers = {_STEP: self._step, **dict.fromkeys(_PARTS, self._part), **dict.fromkeys(_CHANGES, self._change)}
        for name, make in wrappers.items():
            if wrap_method(worker, name, make):
                self._wrappers[name] = weakref.ref(vars(worker)[name])
        if _STEP not in self._wrappers:
            notes.add("moving.steps_begun", f"the worker has no {_STEP}: its steps cannot be counted")
        # Ray's first executor, gone in 0.33 (vllm 0.33.0 v1/executor/abstract.py:76), runs steps on the runner, past
        # the worker (vllm 0.32.0 v1/executor/ray_utils.py:144, `execute_model_ray`): there, no step seen does not mean
        # no step run.
        self._is_bypassed = is_rays(worker)

    def detach(self, worker: Any) -> None:  # noqa: ANN401 - as above
        """Put back the methods; a foreign wrapper that was put over one since stays, with ours inside."""
        for name, reference in self._wrappers.items():
            wrapper = reference()
            if wrapper is not None:
                unwrap_method(worker, name, wrapper)
        self._wrappers = {}

    def progress(self) -> Progress | None:
        if _STEP not in self._wrappers or (self._is_bypassed and not self._seen.begun):
            return None
        return self._seen

    def _step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
            output = self._timed(method, 1, arguments, named)
            plan = arguments[0] if arguments else named.get("scheduler_output")
            # After its last request the engine runs a step without tokens, by which the worker learns that it is over
            # (vllm 0.12.0 v1/core/sched/output.py:175, vllm 0.32.0 v1/core/sched/output.py:247).
            self._had_tokens = getattr(plan, "total_num_scheduled_tokens", None) != 0
            if self._had_tokens:
                self._looks_left, self.tokens_at = _LOOKS, self._clock()
            self._ended(output)
            return output

        return execute_model

    def _part(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def part(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
            output = self._timed(method, 0, arguments, named)
            self._ended(output)
            return output

        return part

    def _change(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
            self.calls += 1
            output = method(*arguments, **named)
            if self._seen.since is None:
                self._on_end(True)
            return output

        return change

    def _timed(self, method: Callable[..., Any], step: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401 - the method's own
        begun, ended, outer, _, _ = self._seen
        now = self._clock()
        self.calls += 1
        self._seen = Progress(begun + step, ended, now, now, get_ident())
        try:
            output = method(*arguments, **named)
        except Exception:  # not SystemExit, by which a worker that is told to end ends
            self.has_failed = True
            raise
        else:
            self.has_failed = False
            return output
        finally:
            # Read again: a call within this one has moved the counts. The call around it, if any, is still running.
            begun, ended, _, _, thread = self._seen
            self._seen = Progress(begun, ended + step, outer, self._clock(), thread)

    def _ended(self, output: object) -> None:
        self.outputs.watch(output)
        if self._seen.since is None:
            must_look = not self._had_tokens and self._looks_left > 0
            self._looks_left -= must_look
            self._on_end(must_look)


class Wait(NamedTuple):
    since: float
    thread: int


class Outputs:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[int, float] = {}
        self._watched: dict[type, type | None] = {}

    def watch(self, output: object) -> None:
        """Time the waits for this output, if it is one that can be waited for.

        The object gets a subclass of its class. Its own `get_output` cannot be replaced on it: an attribute that holds
        the object keeps it, and what it has on the device, until the garbage collector runs; one that does not hold it
        finds it gone, because the engine may pass `output.get_output` on and drop the output (vllm 0.12.0
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
            except TypeError:  # its memory layout differs, as that of a class written in C may
                self._watched[kind] = None

    def oldest(self) -> Wait | None:
        # Copied by one call: other threads come and go meanwhile.
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
