"""Notices a data-parallel engine that is starved among others that work, by vLLM's own counts. Pure.

It has requests that wait, and none that runs, and counts no token: its loop makes steps without tokens, or none. The
recorders' verdict is of all ranks together. No probe restarts it: the others work, and it may go on by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from highwater.readings.engine import EngineLoad
from highwater.recorder.progress import NO_STEP_SECONDS


class Replicas:
    """Keeps since when each data-parallel engine has scheduled nothing, on the caller's monotonic clock."""

    def __init__(self) -> None:
        # By engine: since when, at which count of its own, and which of the others.
        self._still: dict[str, tuple[float, float, float]] = {}

    def starved(self, engines: Mapping[str, EngineLoad], now: float) -> tuple[str, ...]:
        total, before = sum(load.work_done or 0.0 for load in engines.values()), self._still
        self._still, sentences = {}, []
        for name, load in engines.items():
            waiting, deferred = load.requests_waiting or 0, load.waiting_by_reason.get("deferred", 0)
            # What vLLM has put off may wait for its client.
            if load.requests_running != 0 or waiting <= deferred:
                continue
            own = load.work_done or 0.0
            since, was, others = before.get(name, (now, own, total - own))
            self._still[name] = (since, was, others) if was == own else (now, own, total - own)
            seconds = now - since
            if was == own and seconds >= NO_STEP_SECONDS and total - own > others:
                reasons = ", ".join(f"{reason} {count}" for reason, count in load.waiting_by_reason.items() if count)
                sentences.append(
                    f"data-parallel engine {name} (of {len(engines)}) has scheduled nothing for {seconds:.0f} s while "
                    f"others work: {waiting} waiting, none running{reasons and f' (vLLM: {reasons})'}"
                )
        return tuple(sentences)
