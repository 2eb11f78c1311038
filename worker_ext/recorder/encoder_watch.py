"""The encoder cache's figures and largest entries, for many samples a second.

It reads all entries once a second at most (seldomer where that takes long) and right after each operation of ours, by
which a remedy is measured; and then only if something may have changed. It refuses to keep anything of the engine's
from one sample to the next: an entry that the engine drops is freed at once.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from worker_ext.collector import no_collection
from worker_ext.encoder_outputs import entry_bytes, figures_of, find_encoder_cache, moves, read_encoder_outputs
from worker_ext.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_ext.encoder_outputs import EncoderOutputs, Entry
    from worker_ext.notes import Notes
    from worker_ext.recorder.calls import Calls
    from worker_ext.state import WorkerState

_SECONDS = 1.0
_SHARE = 200
"""A reading is good for so many times what it took: the engine's own Python stands still meanwhile."""
_MOST_ENTRIES = 10
_MOST_HASH_CHARACTERS = 64


class _Seen(NamedTuple):
    """What is kept of one reading: numbers and text."""

    at: float
    figures: dict[str, Any]
    largest: list[dict[str, Any]]


class EncoderWatch:
    """Watches one worker's encoder cache.

    Args:
        device_type: The worker's own device type.
        state: The watcher's own: ages count from the first reading that saw an entry, and another thread's readings
            must not come between.
        calls: Tells when the cache may be read.
        cost_clock: Seconds that this thread has taken of the processor.
    """

    def __init__(
        self,
        device_type: str,
        state: WorkerState,
        calls: Calls,
        cost_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._device_type = device_type
        self._state = state
        self._calls = calls
        self._cost_clock = cost_clock
        self._seen: _Seen | None = None
        self._change: object = None
        self._due = float("-inf")
        self._calls_ended = 0

    def look(self, worker: object, now: float, steps: object, notes: Notes) -> None:
        """Read the cache if it is time to, and if anything may have changed.

        Args:
            worker: The worker.
            now: Seconds that only grow.
            steps: Another value after every step; None where steps are not seen.
            notes: Gets why it could not be read.
        """
        if now < self._due and self._calls.ended == self._calls_ended:
            return
        with self._calls.reading() as may_read:
            if not may_read:
                return
            self._calls_ended = self._calls.ended
            started = self._cost_clock()
            with no_collection():
                notes.attempt("encoder_cache", lambda: self._look(worker, now, steps))
            self._due = now + max(_SECONDS, _SHARE * (self._cost_clock() - started))

    def figures(self, now: float) -> dict[str, Any] | None:
        """Return the figures as `memory` has them, None where there is no cache or it could not be read."""
        seen = self._seen
        if seen is None:
            return None
        oldest = seen.figures["oldest_age_seconds"]
        return {**seen.figures, "oldest_age_seconds": None if oldest is None else round(oldest + now - seen.at, 3)}

    def largest(self, now: float) -> list[dict[str, Any]]:
        """Return the largest entries, largest first."""
        seen = self._seen
        if seen is None:
            return []
        grown = now - seen.at
        return [{**row, "age_seconds": round(row["age_seconds"] + grown, 3)} for row in seen.largest]

    def _look(self, worker: object, now: float, steps: object) -> None:
        change = self._change_of(worker, steps)
        if self._seen is not None and change is not None and change == self._change:
            return
        self._seen, self._change = None, None  # should reading fail, nothing is known
        outputs = read_encoder_outputs(worker, self._device_type)
        if outputs is None:
            return
        ages = outputs.ages(self._state)
        largest = heapq.nsmallest(_MOST_ENTRIES, outputs.entries, key=lambda one: (-entry_bytes(one), one.mm_hash))
        rows = [_row(outputs, one, ages[one.mm_hash]) for one in largest]
        self._seen = _Seen(now, figures_of(outputs, ages, worker, self._state), rows)
        self._change = change

    def _change_of(self, worker: object, steps: object) -> object:
        """Return what is the same as long as the cache's entries are, None where that cannot be told."""
        found = find_encoder_cache(worker)
        if found is None or steps is None:
            return None
        # The engine changes entries in its steps, a reset empties the dict or brings another, `trim` and `restore` move
        # entries and count them.
        return id(found[1]), dict.__len__(found[1]), steps, tuple(moves(self._state).values())


def _row(outputs: EncoderOutputs, entry: Entry, age_seconds: float) -> dict[str, Any]:
    on_device = any(map(outputs.is_on_device, entry.storages.values()))
    return {
        "mm_hash": printable(entry.mm_hash)[:_MOST_HASH_CHARACTERS],
        "bytes": entry_bytes(entry),
        "residency": "device" if on_device else "host",
        "age_seconds": age_seconds,
    }
