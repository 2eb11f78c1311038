"""Notices a data-parallel engine that is starved among others that work, by vLLM's own counts. Pure.

It has requests that wait, and none that runs, and counts no token: its loop makes steps without tokens, or none. The
recorders' verdict is of all ranks together. No probe restarts it: the others work, and it may go on by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from highwater.readings.engine import EngineLoad
from highwater.recorder.progress import NO_STEP_SECONDS
from highwater.recorder.rank import RankRecord


class _Count(NamedTuple):
    """An engine's count, and when it was seen to change last, on the caller's monotonic clock."""

    work_done: float
    at: float
    has_moved: bool  # or it was only seen for the first time


class Replicas:
    """Keeps when each data-parallel engine did something last."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def starved(self, engines: Mapping[str, EngineLoad], records: Iterable[RankRecord], now: float) -> tuple[str, ...]:
        """Return a sentence on each engine that has scheduled nothing while another one did, just now.

        Counts stay where they were when the last requests are aborted: where an engine's recorders show that its loop
        makes no step, nothing waits in it.
        """
        steps = [(str(one.identity.dp_rank), makes_steps(one)) for one in records]
        before, self._counts = self._counts, {}
        for name, load in engines.items():
            done, last = load.work_done or 0.0, before.get(name)
            is_same = last is not None and last.work_done == done
            self._counts[name] = last if last is not None and is_same else _Count(done, now, last is not None)
        working = {name for name, one in self._counts.items() if one.has_moved and now - one.at < NO_STEP_SECONDS}
        sentences = []
        for name, load in engines.items():
            waiting, deferred = load.requests_waiting or 0, load.waiting_by_reason.get("deferred", 0)
            seconds = now - self._counts[name].at
            own = {is_made for engine, is_made in steps if engine == name}
            # What vLLM has put off may wait for its client.
            is_idle = load.requests_running != 0 or waiting <= deferred or own == {False}
            if is_idle or seconds < NO_STEP_SECONDS or not working:
                continue
            reasons = ", ".join(f"{reason} {count}" for reason, count in load.waiting_by_reason.items() if count)
            sentences.append(
                f"data-parallel engine {name} (of {len(engines)}) has scheduled nothing for {seconds:.0f} s while "
                f"others work: {waiting} waiting, none running{reasons and f' (vLLM: {reasons})'}"
                + ("" if own else "; no recorder shows its steps, and after an abort its counts may be old")
            )
        return tuple(sentences)


def makes_steps(record: RankRecord) -> bool:
    """Return whether a rank's loop has stepped lately, or may have: it does wherever a request waits."""
    progress = record.progress
    age = None if progress is None else progress.last_step_age_seconds
    return progress is None or not progress.is_out_of_work or (age is not None and age < NO_STEP_SECONDS)
