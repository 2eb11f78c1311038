"""How fast each rank's device fills, by the last two readings that are far enough apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from highwater.accounting.attribution import RankKey, rank_key
from highwater.readings import RankReading, Report

MIN_APART_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Pace:
    """One rank's.

    Attributes:
        at: When the reading was taken that the next one is compared with.
        free_bytes: What was free then.
        bytes_per_second: What is taken of it, negative where some is given back; 0 with one reading.
    """

    at: float
    free_bytes: int
    bytes_per_second: float = 0.0

    @property
    def seconds_to_full(self) -> float:
        """At this pace; infinite where the device does not fill."""
        return self.free_bytes / self.bytes_per_second if self.bytes_per_second > 0 else math.inf


def follow(paces: Mapping[RankKey, Pace], report: Report) -> dict[RankKey, Pace]:
    """The paces, with this report's readings."""
    return {
        rank_key(reading): _next(paces.get(rank_key(reading)), reading, reading.free_bytes)
        for reading in report.ranks
        if reading.free_bytes is not None
    }


def _next(was: Pace | None, reading: RankReading, free: int) -> Pace:
    if was is None or reading.taken_at < was.at:
        return Pace(reading.taken_at, free)
    seconds = reading.taken_at - was.at
    if seconds < MIN_APART_SECONDS:
        return was
    return Pace(reading.taken_at, free, (was.free_bytes - free) / seconds)
