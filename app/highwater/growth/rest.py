"""Says whether the engine is idle, and for how long: floors are taken only then. Pure; no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from highwater.readings import Report, WorkCounts

# PyTorch's counts are still once a step has ended; heaps and the kernel give back late.
DEVICE_REST_SECONDS: Final = 3.0
HOST_REST_SECONDS: Final = 12.0
# In a long rest a floor is taken so often: what leaks without requests shows there.
REPEAT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Rest:
    """The present rest.

    Attributes:
        since: When it began, in monotonic seconds; ``None`` while the engine works, or does not say.
        work: What it had done by then.
    """

    since: float | None = None
    work: WorkCounts = field(default_factory=WorkCounts)

    def seconds(self, now: float) -> float:
        """Return how many seconds it has lasted; 0 while the engine is busy."""
        return 0.0 if self.since is None else now - self.since


def follow(rest: Rest, report: Report, now: float) -> Rest:
    """Return the rest as of a report: it goes on while nothing runs or waits, and no work was counted."""
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
    """Return whether a floor is to be taken.

    Args:
        rest: The present one.
        last: When the last one was taken; ``None`` before the first.
        now: Monotonic seconds.
        rest_seconds: How long a rest must have lasted.
    """
    if rest.since is None or rest.seconds(now) < rest_seconds:
        return False
    return last is None or last < rest.since or now - last >= REPEAT_SECONDS
