"""One worker's memory and progress, read many times a second from a thread of its own.

What is dear is read once a second at most, what never changes once. It shares nothing with the operations that is not
safe to share, and refuses to ask torch's allocator where that could stop the engine for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from worker_ext.attributes import look_up
from worker_ext.devices.figures import AllocatorFigures
from worker_ext.host import read_host, rss_bytes
from worker_ext.memory_parts import read_allocator, read_kv_cache, read_space
from worker_ext.notes import Notes
from worker_ext.recorder.encoder_watch import EncoderWatch
from worker_ext.recorder.stack import stack_of
from worker_ext.state import WorkerState
from worker_ext.weights import weights_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_ext.devices import Device
    from worker_ext.host import HostMemory
    from worker_ext.recorder.calls import Call, Calls
    from worker_ext.recorder.steps import Progress, Steps

T = TypeVar("T")

_SECONDS = 1.0
_LONG_SECONDS = 1.0
"""What has lasted for so long is worth a look at where it is."""


class _Kept(Generic[T]):
    """A value that is read once a second at most."""

    def __init__(self) -> None:
        self._due = float("-inf")
        self._value: T

    def value(self, now: float, read: Callable[[], T]) -> T:
        if now >= self._due:
            self._value = read()
            self._due = now + _SECONDS
        return self._value


class Sampler:
    """Reads one worker; used by one thread only.

    Args:
        state: The worker's own state, of which only what is safe is used: the ledger, and weights counted already.
        steps: Counts its steps.
        calls: Its operations.
    """

    def __init__(self, state: WorkerState, steps: Steps, calls: Calls) -> None:
        self._state = WorkerState(ledger=state.ledger, weights=state.weights, allocator_reserve=state.allocator_reserve)
        self._steps = steps
        self._calls = calls
        self._device: Device | None = None
        self._encoder: EncoderWatch | None = None
        self._host: _Kept[HostMemory] = _Kept()
        self._kv_cache: _Kept[int | None] = _Kept()
        self._stack: _Kept[list[str] | None] = _Kept()
        self._stack_since: float | None = None

    def use(self, device: Device | None) -> None:
        """Read this device from now on: one that the calling thread may ask, None where none is known."""
        self._device = device
        self._encoder = None if device is None else EncoderWatch(device.type, self._state, self._calls)

    def memory(self, worker: object, now: float) -> dict[str, Any]:
        """Return the worker's memory, with the names of the answer to `memory`; what is not known is null.

        Args:
            worker: The worker.
            now: Seconds that only grow.
        """
        notes = Notes()  # a record has no room for them; `memory` tells them all
        device = self._device
        # The container's and the machine's memory from up to a second ago, the process's own from now.
        kept = self._host.value(now, lambda: read_host(notes))
        host = kept._replace(rss_bytes=notes.attempt("host_memory.rss_bytes", rss_bytes))
        weights = None
        if device is not None:
            weights = notes.attempt("weights_bytes", lambda: weights_bytes(worker, device.type, self._state))
        space, torch = read_space(device, host, notes), self._allocator(worker, device, notes)
        return {
            **space._asdict(),
            "torch": torch._asdict(),
            "releasable_bytes": self._state.allocator_reserve.releasable_bytes(torch),
            "weights_bytes": weights,
            "kv_cache_bytes": self._kv_cache.value(now, lambda: self._read_kv_cache(worker, notes)),
            "encoder_cache": self._encoder_cache(worker, now, notes),
            "host_memory": host._asdict(),
        }

    def moving(self, now: float) -> dict[str, Any]:
        """Return whether the worker moves: its steps, our operations, and where it is if either takes long."""
        steps, call = self._steps.progress(), self._calls.current
        since = steps.since if steps else None
        return {
            "steps_begun": steps.begun if steps else None,
            "steps_ended": steps.ended if steps else None,
            "step_seconds": None if since is None else _lasted(since, now),
            "last_step_mono": None if steps is None or steps.last is None else round(steps.last, 6),
            "rpc": call.op if call else None,
            "rpc_seconds": _lasted(call.since, now) if call else None,
            "stack": self._stack_of_what_lasts(steps, call, now),
        }

    def entries(self, now: float) -> tuple[int, list[dict[str, Any]]] | None:
        """Return how many entries the encoder cache has, and the largest; None where there is none."""
        figures = self._encoder.figures(now) if self._encoder else None
        if figures is None or self._encoder is None:
            return None
        return figures["entries"], self._encoder.largest(now)

    def _allocator(self, worker: object, device: Device | None, notes: Notes) -> AllocatorFigures:
        # memory_stats waits for the allocator's lock and keeps Python's for that time (torch/csrc/cuda/Module.cpp,
        # `THCPModule_memoryStats`). The allocator that sleep mode brings takes them the other way round: it calls
        # Python with the allocator's lock held (vllm/device_allocator/cumem.py). From two threads both would wait for
        # ever. `memory` asks on the engine's own thread, where that cannot be.
        if look_up(worker, "vllm_config", "model_config", "enable_sleep_mode"):
            return AllocatorFigures()
        return read_allocator(device, notes)

    def _read_kv_cache(self, worker: object, notes: Notes) -> int | None:
        if self._device is None:
            return None
        return read_kv_cache(worker, self._device.type, self._state.residency, notes).resident_bytes

    def _encoder_cache(self, worker: object, now: float, notes: Notes) -> dict[str, Any] | None:
        if self._encoder is None:
            return None
        steps = self._steps.progress()
        self._encoder.look(worker, now, (steps.begun, steps.ended, steps.last) if steps else None, notes)
        return self._encoder.figures(now)

    def _stack_of_what_lasts(self, steps: Progress | None, call: Call | None, now: float) -> list[str] | None:
        running = [(steps.since, steps.thread)] if steps and steps.since is not None else []
        running += [(call.since, call.thread)] if call else []
        if not running:
            return None
        since, thread = min(running)
        if now - since < _LONG_SECONDS:
            return None
        if since != self._stack_since:
            self._stack, self._stack_since = _Kept(), since
        stack = self._stack.value(now, lambda: stack_of(thread))
        return None if stack is None else list(stack)


def _lasted(since: float, now: float) -> float:
    # What began after this sample did has lasted for nothing yet.
    return max(0.0, round(now - since, 6))
