"""Floors: the values of a series while no request runs or waits, or its lowest ones under load. Pure; no I/O, no clock.

Idle floors are the better evidence: under load a series shows the load. An engine that is never idle has only the
lowest value of each window of some seconds, which counts beside windows with as much work. Floors are thinned by age,
so that a day fits into a bounded number of them: the older, the further apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Final, NamedTuple

from highwater.model.engine import WorkCounts
from highwater.model.growth import GrowthDriver, GrowthGround, GrowthUnit
from highwater.model.report import Report
from highwater.model.units import HOUR_SECONDS, KIB, MIB

MAX_FLOORS: Final = 240
_NEWEST_KEPT, _OLDEST_KEPT = 48, 4
# PyTorch's counts settle once a step has ended; heaps and the kernel free memory late.
DEVICE_IDLE_SECONDS: Final = 3.0
HOST_IDLE_SECONDS: Final = 12.0
# In a long idle period a floor is taken this often, because leaks without requests show there.
REPEAT_SECONDS: Final = 60.0
# A window's length: a process may write its figures each ten seconds only. How often the host is read for it.
WINDOW_SECONDS: Final = 15.0
HOST_SAMPLE_SECONDS: Final = 5.0
# Windows have equal work if the requests in them differ from the usual number by a quarter, or by two.
EQUAL_SHARE, EQUAL_REQUESTS = 0.25, 2.0
KILO: Final = 1000.0


class Floor(NamedTuple):
    """One value of a series, in bytes or a count, and the work until then (``WorkCounts``); NaN: not known.

    ``at`` is in monotonic seconds since the machine's boot, ``wall`` in Unix seconds; ``in_flight`` are the requests
    that ran or waited on average of a window, NaN for an idle floor.
    """

    at: float
    wall: float
    value: float
    requests: float = math.nan
    images: float = math.nan
    new_images: float = math.nan
    tokens: float = math.nan
    sleeps: float = math.nan
    in_flight: float = math.nan

    def progress(self, driver: GrowthDriver) -> float:
        """Return the driver's count so far, in its own unit; NaN where it is not known."""
        if driver == "hour":
            return self.at / HOUR_SECONDS
        if driver == "1k_tokens":
            return self.tokens / KILO
        return self[_FIELDS[driver]]


_FIELDS: Final[Mapping[str, int]] = {"request": 3, "image": 4, "new_image": 5, "sleep": 7}


class Scale(NamedTuple):
    """A unit's smallest growth, and the grain: differences of this size are the allocator's, or the kernel's.

    Of windows under load (``is_loaded``) the interval of a slope is so many times as wide as Kendall's, because
    neighbouring windows share requests.
    """

    min_growth: float
    grain: float
    is_loaded: bool = False
    widening: float = 1.0


SCALES: Final[Mapping[tuple[GrowthUnit, GrowthGround], Scale]] = {
    ("bytes", "idle_floors"): Scale(min_growth=float(MIB), grain=64.0 * KIB),
    ("count", "idle_floors"): Scale(min_growth=16.0, grain=0.5),
    ("bytes", "equal_work"): Scale(min_growth=16.0 * MIB, grain=64.0 * KIB, is_loaded=True, widening=2.0),
    ("count", "equal_work"): Scale(min_growth=16.0, grain=0.5, is_loaded=True, widening=2.0),
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


def of_equal_work(floors: Sequence[Floor]) -> list[Floor]:
    """Return the windows in which about as many requests ran and waited as in most of them."""
    usual = median(floor.in_flight for floor in floors) if floors else 0.0
    most = max(EQUAL_SHARE * usual, EQUAL_REQUESTS)
    return [floor for floor in floors if abs(floor.in_flight - usual) <= most]


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
