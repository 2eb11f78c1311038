"""The recorder of one worker: a thread that samples and writes until it is stopped, or worker or process end.

It refuses to raise into anything, to be waited for longer than a second, and to keep its worker alive.
"""

from __future__ import annotations

import atexit
import math
import os
import time
import weakref
from multiprocessing.util import Finalize
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from worker_ext.devices import device_of
from worker_ext.notes import Notes
from worker_ext.recorder.bodies import fitting
from worker_ext.recorder.calls import Calls
from worker_ext.recorder.sampler import Sampler
from worker_ext.recorder.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worker_ext.recorder.ring import Ring
    from worker_ext.state import WorkerState

_ENTRIES_SECONDS = 1.0
_RETRY_SECONDS = 1.0
"""How long nothing is written after a write that failed."""
_STOP_SECONDS = 1.0
"""How long a stop waits for the thread, which the device's driver or the disk may hold."""
NOT_ENDED = "has not ended within a second: the device's driver or the disk holds its thread, and it ends once let go"
_EARLY = 100
"""Above every priority that multiprocessing gives its own finalizers: they take down what we may still read."""


class Options(NamedTuple):
    """What a recorder was started with."""

    directory: Path
    instance: str
    rate: float
    seconds: float

    @property
    def slots(self) -> int:
        """The records that the file holds: samples, and one more a second for the entries."""
        return math.ceil(self.seconds * (self.rate + 1))

    def path(self, pid: int) -> Path:
        """Return where the file of one process lies."""
        return self.directory / f"highwater-{self.instance}-{pid}.ring"


class _Moment(NamedTuple):
    """One moment by both clocks."""

    at: float
    mono: float


class Recorder:
    """Records one worker.

    Args:
        worker: The worker.
        state: Its state.
        ring: The file; the thread closes it.
        options: What it was started with.
        clock: Seconds that only grow, the same in all processes of a machine.
        wall_clock: Unix seconds.
        wait: Waits for so many seconds, and says whether to stop; by default until `stop`.
    """

    def __init__(
        self,
        worker: object,
        state: WorkerState,
        ring: Ring,
        options: Options,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.options = options
        self.ring = ring
        self.steps = Steps(clock)
        self.calls = Calls(clock)
        self._worker = weakref.ref(worker)
        self._sampler = Sampler(state, self.steps, self.calls)
        self._clock = clock
        self._wall_clock = wall_clock
        self._stopping = Event()
        self._wait = wait or self._stopping.wait
        self._entries_due = clock()
        self._write_from = float("-inf")
        self._pid = os.getpid()
        self._thread: Thread | None = None
        self._finalizer: Finalize[bool] | None = None

    def start(self, notes: Notes) -> None:
        """Count the worker's steps, and start the thread.

        Args:
            notes: Gets why steps cannot be counted.

        Raises:
            RuntimeError: No thread can be started; everything is as it was then, but for the file.
        """
        worker = self._worker()
        self.steps.attach(worker, notes)
        # A daemon: a thread that the driver holds must not hold the interpreter's end.
        thread = Thread(target=self.run, name="highwater-recorder", daemon=True)
        try:
            thread.start()
        except BaseException:
            self.steps.detach(worker)
            raise
        self._thread = thread
        # Workers are mostly multiprocessing's children, which run its finalizers, and `atexit` only where they were
        # spawned, not forked.
        atexit.register(self._end)
        self._finalizer = Finalize(None, self._end, exitpriority=_EARLY)

    def is_running(self) -> bool:
        """Say whether the thread lives; in a forked child of its process it does not."""
        return self._thread is not None and self._pid == os.getpid() and self._thread.is_alive()

    def stop(self) -> bool:
        """Stop counting and recording, and return whether the thread has ended.

        A thread that has not ended within a second ends as soon as it gets on, and writes nothing but its last record.
        """
        worker = self._worker()
        if worker is not None:
            self.steps.detach(worker)
        atexit.unregister(self._end)
        if self._finalizer is not None:
            self._finalizer.cancel()
        return self._end()

    def run(self) -> None:
        """Sample and write until told to stop: the thread's body."""
        # First of all: whatever this thread asked of a device before, it would ask of device 0.
        self._sampler.use(Notes().attempt("device", lambda: device_of(self._worker())))
        period = 1 / self.options.rate
        deadline = self._clock()
        while self._record():
            now = self._clock()
            deadline = _next(deadline, period, now)
            if self._wait(deadline - now):
                break
        self._write("stopped", {}, self._now())
        self.ring.close()

    def _end(self) -> bool:
        self._stopping.set()
        if not self.is_running() or self._thread is None:
            return True
        self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()

    def _record(self) -> bool:
        """Write what there is to write now; False when the worker is gone."""
        worker, now = self._worker(), self._now()
        if worker is None:
            return False
        if now.mono < self._write_from:
            return True
        sample = self._sample(worker, now.mono)
        self._write("sample", sample, now, rows=sample["moving"].get("stack"))
        if self._entries_due <= now.mono >= self._write_from:
            self._entries_due = _next(self._entries_due, _ENTRIES_SECONDS, now.mono)
            found = Notes().attempt("encoder_cache", lambda: self._sampler.entries(now.mono))
            if found is not None:
                total, largest = found
                self._write("entries", {"total": total, "largest": largest}, now, rows=largest)
        return True

    def _sample(self, worker: object, now: float) -> dict[str, Any]:
        started, notes = time.thread_time(), Notes()
        # Either may fail without the other.
        moving = notes.attempt("moving", lambda: self._sampler.moving(now))
        memory = notes.attempt("memory", lambda: self._sampler.memory(worker, now))
        # The processor's time, not the clock's: while this thread waits for Python's lock, the engine works.
        cost = round((time.thread_time() - started) * 1000, 3)
        return {"memory": memory or {}, "moving": moving or {}, "cost_ms": cost}

    def _now(self) -> _Moment:
        return _Moment(self._wall_clock(), self._clock())

    def _write(self, kind: str, values: dict[str, Any], now: _Moment, rows: list[Any] | None = None) -> None:
        record = {"kind": kind, "at": round(now.at, 6), "mono": round(now.mono, 6), **values}
        try:
            self.ring.write(fitting(record, rows))
        except Exception:  # noqa: BLE001 - there is nobody to tell, and the next one may be written again
            self._write_from = now.mono + _RETRY_SECONDS


def _next(deadline: float, period: float, now: float) -> float:
    """Return the first deadline that is still to come: from deadline to deadline, so that delays do not add up."""
    return deadline + period * max(1, math.floor((now - deadline) / period) + 1)
