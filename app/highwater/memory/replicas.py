"""Notices a data-parallel engine that is starved among others that work, by vLLM's own counts. Pure.

It has requests that wait, and none that runs, and counts no token: its loop makes steps without tokens, or none. The
recorders' verdict is of all ranks together. No probe restarts it: the others work, and it may go on by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from highwater.readings.engine import EngineLoad
from highwater.recorder.progress import NO_STEP_SECONDS


class _Still(NamedTuple):
    since: float
    work_done: float | None  # its own count; `others`: that of the others, when it stood still first
    others: float


class Replicas:
    """Keeps since when each data-parallel engine has scheduled nothing, on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._still: dict[str, _Still] = {}

    def starved(self, engines: Mapping[str, EngineLoad], now: float) -> tuple[str, ...]:
        """Return a sentence for each one that is starved; ``engines`` are the counts of this round."""
        total, before = sum(load.work_done or 0.0 for load in engines.values()), self._still
        self._still, sentences = {}, []
        for name, load in engines.items():
            waiting, deferred = load.requests_waiting or 0, load.waiting_by_reason.get("deferred", 0)
            # What vLLM has put off may wait for its client.
            if load.requests_running != 0 or waiting <= deferred:
                continue
            others = total - (load.work_done or 0.0)
            still = before.get(name)
            if still is None or still.work_done != load.work_done:
                still = _Still(now, load.work_done, others)
            self._still[name] = still
            seconds = now - still.since
            if seconds >= NO_STEP_SECONDS and others > still.others:
                reasons = ", ".join(f"{reason} {count}" for reason, count in load.waiting_by_reason.items() if count)
                sentences.append(
                    f"data-parallel engine {name} (of {len(engines)}) has scheduled nothing for {seconds:.0f} s while "
                    f"others work: {waiting} waiting, none running{reasons and f' (vLLM: {reasons})'}"
                )
        return tuple(sentences)
