"""Idle floors: the values of a series while no request runs or waits. Pure; no I/O, no clock.

Only such values are compared: under load a series shows the load. Floors are thinned by age, so that a day fits into a
bounded number of them: the older, the further apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from highwater.readings.engine import WorkCounts
from highwater.readings.growth import GrowthDriver, GrowthUnit
from highwater.readings.report import Report
from highwater.units import HOUR_SECONDS, KIB, MIB

MAX_FLOORS: Final = 240
_NEWEST_KEPT, _OLDEST_KEPT = 48, 4
# PyTorch's counts settle once a step has ended; heaps and the kernel free memory late.
DEVICE_IDLE_SECONDS: Final = 3.0
HOST_IDLE_SECONDS: Final = 12.0
# In a long idle period a floor is taken this often, because leaks without requests show there.
REPEAT_SECONDS: Final = 60.0
KILO: Final = 1000.0


class Floor(NamedTuple):
    """One value of a series while idle, in bytes or a count, and the work until then (``WorkCounts``); NaN: not known.

    ``at`` is in monotonic seconds since the machine's boot, ``wall`` in Unix seconds.
    """

    at: float
    wall: float
    value: float
    requests: float = math.nan
    images: float = math.nan
    new_images: float = math.nan
    tokens: float = math.nan
    sleeps: float = math.nan

    def progress(self, driver: GrowthDriver) -> float:
        """Return the driver's count so far, in its own unit; NaN where it is not known."""
        if driver == "hour":
            return self.at / HOUR_SECONDS
        if driver == "1k_tokens":
            return self.tokens / KILO
        return self[_FIELDS[driver]]


_FIELDS: Final[Mapping[str, int]] = {"request": 3, "image": 4, "new_image": 5, "sleep": 7}


class Scale(NamedTuple):
    """A unit's smallest growth, and the grain: differences of this size are the allocator's, or the kernel's."""

    min_growth: float
    grain: float


SCALES: Final[Mapping[GrowthUnit, Scale]] = {
    "bytes": Scale(min_growth=float(MIB), grain=64.0 * KIB),
    "count": Scale(min_growth=16.0, grain=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An upper limit of growth by design.

    Attributes:
        limit: The value up to which growth is by design; with ``is_above_start`` the most that the series may grow.
        what: The limit in words: ``encoder cache budget``.
        drivers: Growth that follows other drivers is not by this design; empty: any driver.
    """

    limit: float
    what: str
    drivers: frozenset[GrowthDriver] = frozenset()
    is_above_start: bool = False

    def from_start(self, value: float) -> Bound:
        """Return the bound as a value of the series, by what it was at its start."""
        return replace(self, limit=self.limit + value, is_above_start=False) if self.is_above_start else self


class Happening(NamedTuple):
    """An event that may have made a step, or lowered the series by a reset; ``at`` as in a floor."""

    at: float
    what: str
    is_reset: bool = False


def superfluous(times: Sequence[float]) -> int:
    """Return the index of the floor to drop by their times, oldest first: its gap is the smallest for its age.

    The newest and the first few are kept, because verdicts compare with the start of a series: there are more than
    ``_NEWEST_KEPT + _OLDEST_KEPT``.
    """
    now = times[-1]
    middle = range(_OLDEST_KEPT, len(times) - _NEWEST_KEPT)
    return min(middle, key=lambda i: (times[i + 1] - times[i - 1]) / max(now - times[i], 1.0))


def binned(floors: Sequence[Floor], most: int) -> list[Floor]:
    """Return at most so many floors, each the median of its neighbours; outliers are dropped."""
    if len(floors) <= most:
        return list(floors)
    edges = [round(i * len(floors) / most) for i in range(most + 1)]
    parts = (floors[low:high] for low, high in pairwise(edges))
    return [sorted(part, key=attrgetter("value"))[(len(part) - 1) // 2] for part in parts]


# --- the idle periods in which floors are taken ---


@dataclass(frozen=True, slots=True)
class IdlePeriod:
    """The present time without requests, since a monotonic time; ``None`` while the engine works, or is not known."""

    since: float | None = None
    work: WorkCounts = field(default_factory=WorkCounts)

    def seconds(self, now: float) -> float:
        """Return its length in seconds; 0 while the engine is busy."""
        return 0.0 if self.since is None else now - self.since


def follow(idle: IdlePeriod, report: Report, now: float) -> IdlePeriod:
    """Return the idle period as of a report: it goes on while no request runs or waits, and no work was counted."""
    engine, progress = report.engine, report.progress
    is_idle = engine.requests_running == 0 and not engine.requests_waiting
    is_still = progress is None or progress.verdict in {"idle", "unknown"}
    is_awake = engine.traits.serves and not engine.traits.is_late
    if report.stale or not (is_idle and is_still and is_awake):
        return IdlePeriod(work=engine.work)
    if idle.since is None or engine.work != idle.work:
        return IdlePeriod(since=now, work=engine.work)
    return replace(idle, work=engine.work)


def follow_sleep(asleep: IdlePeriod, report: Report, now: float) -> IdlePeriod:
    """Return the time asleep as of a report; the work's count of sleeps goes up as one begins."""
    if report.engine.state != "sleeping":
        return replace(asleep, since=None)
    if asleep.since is not None:
        return asleep
    return IdlePeriod(since=now, work=replace(report.engine.work, sleeps=(asleep.work.sleeps or 0) + 1))


def is_due(idle: IdlePeriod, last: float | None, now: float, *, idle_seconds: float) -> bool:
    """Return whether a floor must be taken now, given the time of the last one and the least idle time."""
    if idle.since is None or idle.seconds(now) < idle_seconds:
        return False
    return last is None or last < idle.since or now - last >= REPEAT_SECONDS
