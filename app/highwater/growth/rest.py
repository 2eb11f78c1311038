"""The engine's rests, in which floors are taken. Pure; no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from highwater.readings import Report, WorkCounts

# PyTorch's counts settle once a step has ended; heaps and the kernel free memory late.
DEVICE_REST_SECONDS: Final = 3.0
HOST_REST_SECONDS: Final = 12.0
# In a long rest a floor is taken this often, because leaks without requests show there.
REPEAT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Rest:
    """The present rest.

    Attributes:
        since: Its begin, in monotonic seconds; ``None`` while the engine works, or its state is not known.
        work: The engine's work until then.
    """

    since: float | None = None
    work: WorkCounts = field(default_factory=WorkCounts)

    def seconds(self, now: float) -> float:
        """Return its length in seconds; 0 while the engine is busy."""
        return 0.0 if self.since is None else now - self.since


def follow(rest: Rest, report: Report, now: float) -> Rest:
    """Return the rest as of a report: it goes on while no request runs or waits, and no work was counted."""
    engine, progress = report.engine, report.progress
    is_idle = engine.requests_running == 0 and not engine.requests_waiting
    is_still = progress is None or progress.verdict in {"idle", "unknown"}
    is_awake = engine.traits.serves and not engine.traits.is_late
    if report.stale or not (is_idle and is_still and is_awake):
        return Rest(work=engine.work)
    if rest.since is None or engine.work != rest.work:
        return Rest(since=now, work=engine.work)
    return replace(rest, work=engine.work)


def is_due(rest: Rest, last: float | None, now: float, *, rest_seconds: float) -> bool:
    """Return whether a floor must be taken.

    Args:
        rest: The present rest.
        last: The time of the last floor; ``None`` before the first.
        now: Monotonic seconds.
        rest_seconds: The least length of a rest.
    """
    if rest.since is None or rest.seconds(now) < rest_seconds:
        return False
    return last is None or last < rest.since or now - last >= REPEAT_SECONDS
