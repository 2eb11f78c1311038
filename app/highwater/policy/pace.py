"""The rate at which each rank's device fills, by the last two readings that are far enough apart. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from highwater.accounting.rank_key import RankKey, rank_key
from highwater.readings.report import Report

MIN_APART_SECONDS = 0.5


class Pace(NamedTuple):
    """One rank's last reading, and the bytes taken per second before it: negative where some were given back."""

    at: float
    free_bytes: int
    bytes_per_second: float = 0.0

    @property
    def seconds_to_full(self) -> float:
        """At this pace; infinite where the device does not fill."""
        return self.free_bytes / self.bytes_per_second if self.bytes_per_second > 0 else math.inf


def follow(paces: Mapping[RankKey, Pace], report: Report) -> dict[RankKey, Pace]:
    return {
        rank_key(reading): _next(paces.get(rank_key(reading)), reading.taken_at, reading.free_bytes)
        for reading in report.ranks
        if reading.free_bytes is not None
    }


def _next(before: Pace | None, taken_at: float, free: int) -> Pace:
    if before is None or taken_at < before.at:
        return Pace(taken_at, free)
    seconds = taken_at - before.at
    return before if seconds < MIN_APART_SECONDS else Pace(taken_at, free, (before.free_bytes - free) / seconds)
