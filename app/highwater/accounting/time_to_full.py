"""The forecast: the time until memory is full, at the pace of the last minute.

A pace is the least-squares slope of used bytes over time; the forecast is what is free over that pace. What is slower
than ``SLOWEST_BYTES_PER_SECOND``, seen for less than ``MIN_PACE_SECONDS`` or further away than ``HORIZON_SECONDS``
gives none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import linear_regression
from typing import TypeAlias

from highwater.readings.growth import RankGrowth
from highwater.readings.rank import RankReading
from highwater.units import KIB

# Slower growth is noise, further away is no forecast, and fewer seconds show the steps rather than where they lead.
SLOWEST_BYTES_PER_SECOND = 64 * KIB
HORIZON_SECONDS = 86_400.0
MIN_PACE_SECONDS = 15.0

# When, and how many bytes were used then; oldest first.
Points: TypeAlias = Sequence[tuple[float, float]]


def seconds_until(
    room_bytes: float | None,
    bytes_per_second: float | None,
    *,
    slowest: float = SLOWEST_BYTES_PER_SECOND,
    horizon: float = HORIZON_SECONDS,
) -> float | None:
    """Return the seconds until so many bytes are used up.

    ``None`` where that is unknown, beyond ``horizon`` (seconds), or where the pace is noise: below ``slowest`` (bytes
    per second).
    """
    if room_bytes is None or bytes_per_second is None or bytes_per_second < slowest:
        return None
    seconds = max(room_bytes, 0) / bytes_per_second
    return seconds if seconds <= horizon else None


def time_to_full(rank: RankReading, recent: Points) -> RankGrowth:
    """Return a rank's pace, and when its device is full at that pace."""
    is_long = bool(recent) and recent[-1][0] - recent[0][0] >= MIN_PACE_SECONDS
    pace = slope(recent) if is_long else None
    left = seconds_until(rank.free_bytes, pace)
    return RankGrowth(rank=rank.rank, dp_rank=rank.dp_rank, bytes_per_second=pace, seconds_to_full=left)


def slope(points: Points) -> float | None:
    """Return the least-squares slope, in bytes per second; ``None`` below three points, which would show only noise."""
    if len(points) < 3 or points[0][0] == points[-1][0]:  # noqa: PLR2004 - a line through two points says nothing
        return None
    start = points[0][0]
    pace = linear_regression([at - start for at, _ in points], [size for _, size in points]).slope
    return pace if math.isfinite(pace) else None
