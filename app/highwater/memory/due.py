"""Decides which requests one poll makes: no more than it takes to know the engine's state. Pure; no I/O, no clock.

==================  =======================================  =======================================================
request             every rank is recorded                   else
==================  =======================================  =======================================================
``/metrics``        every round; while idle every 15 s, and  every round
                    ``/health`` in the others
workers' memory     never: their recorders say it all        every round; without work every ``idle_poll_seconds``
``/is_paused``      never while steps progress; while idle   every round; without work every ``idle_poll_seconds``
                    every 15 s, paused or asleep every
                    ``idle_poll_seconds``; else every round
==================  =======================================  =======================================================

In a long step, and while recorded ranks are stuck in one, only the API server is called: the engine's loop cannot
respond. A loop that has left a request without a response is called until it responds, or the ranks move.
"""

from __future__ import annotations

from dataclasses import dataclass

from highwater.memory.sources.source import Reach
from highwater.readings.engine import ProgressVerdict

IDLE_SECONDS = 15.0
"""The time between two requests to an engine that its recorders show to be idle."""
SETTLE_SECONDS = 3.0
"""For so long after a worker's last call the API server's counts may still be older than the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    is_recorded: bool = False  # every rank's recorder writes and shows as much as the worker would report
    verdict: ProgressVerdict | None = None  # the progress that the recorders show; `None` without any
    still_seconds: float = 0.0  # since a worker was last seen to begin a call of the engine
    has_requests: bool = False  # the engine counted requests last, or some are under way through this sidecar
    is_held: bool = False  # the engine was paused or asleep at the last round
    is_without_work: bool = False  # the API server counts no work since the workers responded last
    is_unanswered: bool = False  # the engine's loop has not responded to the last request that needed it
    is_sure: bool = True  # the last poll got every response, its report is fresh, and no worker has ended since

    @property
    def is_idle(self) -> bool:
        is_still = self.still_seconds >= SETTLE_SECONDS and not self.has_requests
        return self.is_recorded and self.verdict == "idle" and is_still and self.is_sure

    @property
    def is_progressing(self) -> bool:
        return self.is_recorded and self.verdict == "progressing" and self.still_seconds < SETTLE_SECONDS


def is_due(
    reach: Reach, situation: Situation, answered_seconds_ago: float | None, *, idle_poll_seconds: float, slack: float
) -> bool:
    """Return whether a request is to be made in this poll, which may come ``slack`` seconds before its time.

    ``answered_seconds_ago`` is ``None`` without a response in this life of the engine.
    """

    def has_passed(seconds: float) -> bool:
        return answered_seconds_ago is None or answered_seconds_ago >= seconds - slack

    if reach == "api_server":
        return not situation.is_idle or has_passed(IDLE_SECONDS)
    is_in_step = situation.verdict == "stuck" and situation.is_recorded and not situation.is_unanswered
    if situation.verdict == "busy" or is_in_step:
        return False
    if situation.is_idle:
        return reach == "engine" and has_passed(idle_poll_seconds if situation.is_held else IDLE_SECONDS)
    if situation.is_recorded:
        return reach == "engine" and (situation.is_held or not situation.is_progressing)
    return not (situation.is_sure and situation.is_without_work) or has_passed(idle_poll_seconds)
