"""The recorder of one worker: it samples and writes until it is stopped, or worker or process end.

Samples are taken where the engine calls its worker, after a step: on the process's main thread only. The thread that is
started here writes heartbeats. Neither raises, holds the engine up for longer than a sample takes, or keeps the worker
alive.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from threading import Event, get_ident, main_thread
from typing import Any, NamedTuple

from highwater_worker.devices import HostMemory, read_host
from highwater_worker.errors import Notes
from highwater_worker.memory.engine_budget import read_budget, read_engine_budget
from highwater_worker.recorder.reading import Depth, MemoryReader
from highwater_worker.recorder.stacks import Stacks
from highwater_worker.recorder.steps import Steps
from highwater_worker.state import state_of
from highwater_worker.wire import MAX_HEAD_BYTES, Options, Ring, Writer, encoded

BUSY_BEAT_SECONDS = 0.1
IDLE_BEAT_SECONDS = 1.0
_LINGER_SECONDS = 2.0
"""For so long after the last step or operation heartbeats still come quickly: a caller may wait for the outcome."""
_HOST_SECONDS = 1.0
_SAMPLE_SHARE = 100
"""After a sample there is none for so many times its duration: at most a 100th of the engine's thread."""
_RETRY_SECONDS = 1.0  # the pause in writing after a write that failed
_MAX_NOTES = 4  # in the head of an entry table, which has a fixed size
_MAX_WAITING = 256  # samples that wait for a disk; older ones are dropped


class Call(NamedTuple):
    since: float
    thread: int
    op: str


class _Now(NamedTuple):
    at: float
    mono: float

    def record(self, kind: str, **values: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever a record holds
        return {"kind": kind, "at": round(self.at, 6), "mono": round(self.mono, 6), **values}


class Recorder(Writer):
    """Records one worker.

    Where its file is `in_memory` the engine's thread may write into it; a disk's journal can hold a writer for seconds,
    so only the recorder's thread writes there. `clock` is monotonic seconds, the same in all processes of a machine.
    `wait` waits for so many seconds, and returns whether to stop; by default until `stop`.
    """

    def __init__(
        self,
        worker: object,
        ring: Ring,
        options: Options,
        *,
        in_memory: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__("highwater-recorder")
        self.options = options
        self.ring = ring
        self.steps = Steps(clock, self._after_call)
        self.current: Call | None = None  # the operation of this package that is running
        self._operations_begun = 0
        # Called on the engine's thread only: the caller may hold the last reference, and would then free its tensors.
        self._worker = weakref.ref(worker, self._forget_worker)
        self._is_worker_gone = False
        self._reader = MemoryReader()
        self._stacks = Stacks()
        self._clock = clock
        self._wall_clock = wall_clock
        self._woken = Event()
        self._wait = wait or self._wait_for_news
        self._parent = os.getppid()
        # Of the engine's thread:
        self._main_thread = main_thread().ident
        self._tick = 0
        self._sample_from = self._write_from = float("-inf")
        self._last_cost_ms: float | None = None
        self._notes_written: list[dict[str, str]] | None = None  # with the table; None: it is to be written
        self._engine_budget: dict[str, Any] | None = None
        # Of the recorder's thread:
        self._host = HostMemory()
        self._host_due = float("-inf")
        self._activity = -1
        self._busy_until = float("-inf")
        # From the engine's thread to the recorder's:
        self._samples: deque[bytes] | None = None if in_memory else deque(maxlen=_MAX_WAITING)
        self._table: tuple[bytes, bytes] | None = None

    # --- starting and stopping ---

    def start(self, notes: Notes) -> None:
        """Count the worker's steps, take a first sample, and start the thread.

        `notes` gets the names of values that will not be recorded. Raises RuntimeError where no thread can be started;
        everything is as it was then, but for the file.
        """
        worker = self._worker()
        if get_ident() != self._main_thread:
            notes.add("samples", "this call does not run on the process's main thread: there may be no samples")
        self.steps.attach(worker, notes)
        self._read_host(self._clock())
        self._sample(in_full=True)
        try:
            self.start_thread()
        except BaseException:
            self._stopped.set()
            self.steps.detach(worker)
            raise
        self.end_with_process()  # the worker is not reached from there

    @contextmanager
    def operation(self, op: str) -> Iterator[None]:
        before, self.current = self.current, Call(self._clock(), get_ident(), op)
        self._operations_begun += 1
        self._woken.set()
        try:
            yield
        finally:
            self.current = before
            self._sample(in_full=True)
            self._woken.set()

    def stop(self) -> bool:
        """Stop counting and recording, and return whether the thread has ended.

        A thread that has not ended within a second writes nothing but its last record.
        """
        worker = self._worker()
        if worker is not None:
            self.steps.detach(worker)
        self.forget_process()
        return self.end()

    def _forget_worker(self, _: object) -> None:
        self._is_worker_gone = True
        self._woken.set()

    def end(self) -> bool:
        self._stopped.set()
        self._woken.set()
        return super().end()

    # --- on the engine's thread ---

    def _after_call(self, must_look: bool) -> None:
        tick = math.floor(self._wall_clock() * self.options.rate)
        # By the wall clock: ranks of one machine sample after the same step, and hold each other up once for all.
        if must_look or (tick != self._tick and self._clock() >= self._sample_from):
            self._tick = tick
            # Where nothing comes after, everything is read now; no request waits for the engine then.
            self._sample(in_full=must_look)

    def start_changed(self) -> None:
        """Write down another phase of the worker's start; on the engine's thread."""
        self._notes_written = self._engine_budget = None
        self._reader.start_changed()
        self._sample(in_full=True)

    def _sample(self, *, in_full: bool) -> None:
        """Take a sample, with all encoder outputs that may have changed if `in_full`; never raises."""
        if self._stopped.is_set() or get_ident() != self._main_thread or os.getpid() != self.pid:
            return
        started, now = time.perf_counter(), self._now()
        try:
            worker = self._worker()
            if worker is not None and now.mono >= self._write_from:
                self._write_sample(worker, now, in_full=in_full)
        except Exception:  # noqa: BLE001 - it runs in the engine's step; the disk is full, say, and may not be later
            self._write_from = now.mono + _RETRY_SECONDS
        cost = time.perf_counter() - started
        self._last_cost_ms = round(cost * 1000, 3)
        self._sample_from = now.mono + _SAMPLE_SHARE * cost

    def _write_sample(self, worker: object, now: _Now, *, in_full: bool) -> None:
        notes = Notes()
        self._reader.host = self._host
        change = self._calls_begun() if self.steps.progress() else None
        depth = Depth.FULL if in_full else Depth.STEP
        memory = notes.attempt("memory", lambda: self._reader.read(worker, depth, now.mono, change))
        record = now.record(
            "sample",
            calls=self._calls_begun(),
            memory=memory or {},
            moving=self._moving(now.mono),
            cost_ms=self._last_cost_ms,
        )
        body = encoded(record)
        if self._samples is None:
            self.ring.write(body)
        else:
            self._samples.append(body)
        index = self._reader.index
        if self._reader.notes != self._notes_written or (index is not None and index.is_new):
            total, rows = (0, b"") if index is None else index.table()
            start = state_of(worker).start
            if self._engine_budget is None:
                # Constant after the start: read once, and again after each phase.
                self._engine_budget = notes.attempt("engine_budget", lambda: read_engine_budget(worker, start)) or {}
            head = now.record(
                "entries",
                total=total,
                budget=read_budget(worker, notes),
                start=[] if start is None else start.phases,
                engine_budget=self._engine_budget or None,
                notes=self._reader.notes[:_MAX_NOTES],
            )
            packed = encoded(head)
            if len(packed) > MAX_HEAD_BYTES:  # the entries and the start come first
                packed = encoded({**head, "engine_budget": None})
            table = packed, rows if self.ring.layout.rows else b""
            if self._samples is None:
                self.ring.write_table(*table)
            else:
                self._table = table
            self._notes_written = self._reader.notes

    # --- on the recorder's thread ---

    def run(self) -> None:
        while not self._is_worker_gone:
            if self._wait(self._beat()):
                break
        self._flush()
        # In order: no step has failed, and the process that started the worker lives. When EngineCore is killed its
        # workers end by themselves, as they do when it tells them to.
        has_lost_parent = parent_process() is not None and os.getppid() != self._parent
        self._write_heartbeat(self._now(), None, is_last=not (self.steps.has_failed or has_lost_parent))
        self._stopped.set()
        self._stacks.close()
        self.ring.close()
        if self._is_worker_gone:
            self.forget_process()

    def _beat(self) -> float:
        """Write everything that is due, and return the seconds until the next time; never raises."""
        now, notes = self._now(), Notes()
        steps, output = self.steps.progress(), self.steps.outputs.oldest()
        waits = [(steps.since, steps.thread)] if steps is not None and steps.since is not None else []
        waits += [(wait.since, wait.thread) for wait in (self.current, output) if wait is not None]
        activity, wait = self._calls_begun(), min(waits, default=None)
        if activity != self._activity or wait is not None:
            self._activity, self._busy_until = activity, now.mono + _LINGER_SECONDS
        if now.mono >= self._host_due:
            self._read_host(now.mono)
        since, thread = wait or (None, 0)
        dump = notes.attempt("stack", lambda: self._stacks.look(since, thread, now.mono))
        call = None
        if now.mono < self._busy_until:
            self._stacks.forget_call()
        else:
            call = notes.attempt("call", lambda: self._stacks.look_for_call(self._main_thread or 0, now.mono))
        self._flush()
        self._write_heartbeat(now, dump, call=call)
        return BUSY_BEAT_SECONDS if now.mono < self._busy_until else IDLE_BEAT_SECONDS

    def _read_host(self, now: float) -> None:
        self._host_due = now + _HOST_SECONDS
        self._host = read_host(Notes())

    def _flush(self) -> None:
        table, self._table = self._table, None
        with suppress(OSError, ValueError):  # there is nowhere to report it, and the next one may be written again
            while self._samples:
                self.ring.write(self._samples.popleft())
            if table is not None:
                self.ring.write_table(*table)

    def _write_heartbeat(
        self, now: _Now, dump: str | None, *, call: tuple[str, float] | None = None, is_last: bool = False
    ) -> None:
        record = now.record(
            "stopped" if is_last else "heartbeat",
            calls=self._calls_begun(),
            moving=self._moving(now.mono, call),
            # Others change these while the worker takes no sample: it is idle, or has outlived a rank that was killed.
            **self._host._asdict(),
            free_bytes=self._host.free_bytes,
            dump=dump,
        )
        with suppress(OSError, ValueError):  # as above
            self.ring.write_heartbeat(encoded(record))

    def _wait_for_news(self, seconds: float) -> bool:
        self._woken.wait(seconds)
        self._woken.clear()
        return self._stopped.is_set()

    # --- on either thread ---

    def _now(self) -> _Now:
        return _Now(self._wall_clock(), self._clock())

    def _calls_begun(self) -> int:
        return self.steps.calls + self._operations_begun

    def _moving(self, now: float, called: tuple[str, float] | None = None) -> dict[str, Any]:
        steps, call, output = self.steps.progress(), self.current, self.steps.outputs.oldest()
        return {
            "steps_begun": steps.begun if steps else None,
            "steps_ended": steps.ended if steps else None,
            "step_seconds": None if steps is None or steps.since is None else _lasted(steps.since, now),
            "last_step_mono": None if steps is None or steps.last is None else round(steps.last, 6),
            "output_seconds": None if output is None else _lasted(output.since, now),
            "rpc": call.op if call else None,
            "rpc_seconds": _lasted(call.since, now) if call else None,
            "call": called[0] if called else None,
            "call_seconds": _lasted(called[1], now) if called else None,
            "last_step_empty": self.steps.was_empty,
            "tokens_mono": round(self.steps.tokens_at, 6) if steps else None,
        }


def _lasted(since: float, now: float) -> float:
    # What began after this moment has lasted for nothing yet.
    return max(0.0, round(now - since, 6))
