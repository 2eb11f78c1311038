"""The forecast: when a rank's device is full at its pace, and which component fills it. Pure.

There is none below a level that memory has come down from within ``TRACK_SECONDS``, by a relief or by itself: it may do
so again. And none before memory has grown for a sixth of the time foretold, or for a minute.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from operator import sub
from statistics import fmean
from typing import Final

from highwater.accounting.components import COMPONENT_NAMES
from highwater.accounting.encoder_cache import budget_bytes
from highwater.accounting.pace import SLOWEST_BYTES_PER_SECOND, STEADY, Pace, Track, pace_of
from highwater.readings.growth import RankGrowth
from highwater.readings.rank import RankReading

TRACK_SECONDS: Final = STEADY.windows[0]
HORIZON_SECONDS = 86_400.0  # further away is no forecast
_WATCHED_SHARE, _WATCHED_SECONDS = 1 / 6, 60.0
# What is left must be that much more than one step of the growth, than the scatter around it, and than what still comes
# of a growth that slackens; and one that quickens may not use it up in that share of the time: else the forecast is
# wrong by a third.
_STEPS, _SCATTERS, _SLACK, _SOON = 4.0, 10.0, 2.5, 0.8
_CACHE, _PASSED = "encoder_cache_bytes", 1.1  # beyond so many times its budget a cache is not held to it


def seconds_until(
    room_bytes: float | None,
    bytes_per_second: float | None,
    *,
    slowest: float = SLOWEST_BYTES_PER_SECOND,
    horizon: float = HORIZON_SECONDS,
) -> float | None:
    """Return the seconds until so many bytes are used up.

    ``None``: unknown, beyond ``horizon`` (seconds), or the pace is noise: below ``slowest`` (bytes per second).
    """
    if room_bytes is None or bytes_per_second is None or bytes_per_second < slowest:
        return None
    seconds = max(room_bytes, 0) / bytes_per_second
    return seconds if seconds <= horizon else None


def time_to_full(rank: RankReading, track: Track) -> RankGrowth:
    pace, refills = pace_of(track), refill_seconds(track)
    grown = RankGrowth(rank=rank.rank, dp_rank=rank.dp_rank, refill_seconds=refills)
    if pace is None:
        return grown
    grows = pace.bytes_per_second >= SLOWEST_BYTES_PER_SECOND
    grown = replace(grown, bytes_per_second=pace.bytes_per_second, component=_grower(track, pace) if grows else None)
    left = None if refills is not None else forecast(track, pace, rank.free_bytes)
    cache, budget = track.part(_CACHE), budget_bytes(rank.encoder_cache)
    if left is None or rank.free_bytes is None or budget is None or not cache or cache[-1] > _PASSED * budget:
        return replace(grown, seconds_to_full=left)
    room = max(budget - int(cache[-1]), 0)
    if (cache[-1] - cache[pace.first]) / pace.seconds * left <= room:
        return replace(grown, seconds_to_full=left)
    # The encoder cache grows no further than its budget: the forecast is that of all else.
    others = replace(
        track, used=[*map(sub, track.used, cache)], part=lambda name: () if name == _CACHE else track.part(name)
    )
    grown, pace = replace(grown, cache_room_bytes=room), pace_of(others)
    if pace is not None and (left := forecast(others, pace, rank.free_bytes - room)) is not None:
        grown = replace(grown, seconds_to_full=left, component=_grower(others, pace))
    return grown


def forecast(track: Track, pace: Pace, free_bytes: int | None) -> float | None:
    """Return the seconds until so many bytes are used up; ``None`` where the readings do not foretell it."""
    room = None if free_bytes is None else free_bytes + track.used[-1] - pace.now
    left = seconds_until(room, pace.bytes_per_second)
    if room is None or left is None:
        return None
    watched = left * _WATCHED_SHARE
    if pace.seconds < (watched if pace.is_kinked else min(watched, _WATCHED_SECONDS)):
        return None
    used, first = track.used, pace.first
    step = max(map(sub, used[first + 1 :], used[first:])) - (used[-1] - used[first]) / (len(used) - 1 - first)
    if room < max(_STEPS * step, _SCATTERS * pace.scatter) or _SLACK * room > pace.to_come:
        return None
    soon = _SOON * left
    is_too_quick = room < (pace.bytes_per_second + pace.gain * (pace.seconds + soon) / 2) * soon
    is_new = used[-1] - max(used[:first], default=-math.inf) >= pace.bytes_per_second * pace.seconds / 2
    return left if is_new and not is_too_quick else None


def refill_seconds(track: Track) -> float | None:
    """Return in what time memory fills again after each relief; ``None`` where it does not, or is not given back."""
    if len(track.reliefs) < 2:  # noqa: PLR2004 - once is no rhythm
        return None
    before, last = track.reliefs[-2:]
    wave, since = (
        track.used[bisect_right(track.at, begin) : bisect_right(track.at, end)]
        for begin, end in ((before, last), (last, math.inf))
    )
    if not wave or not since or track.at[-1] - last > 1.5 * (last - before):
        return None
    crest, half = max(wave), (max(wave) - min(wave)) / 2
    return last - before if min(since) <= crest - half and since[-1] <= crest + half and half > 0 else None


def _grower(track: Track, pace: Pace) -> str | None:
    """Return the component with most of the growth; ``None`` where none has half of it, or it is not known."""
    third = max((len(track.at) - pace.first) // 3, 1)
    grown = {
        name: fmean(values[-third:]) - fmean(values[pace.first : pace.first + third])
        for name in COMPONENT_NAMES
        if (values := track.part(name))
    }
    most = max(grown, key=lambda name: grown[name], default=None)
    return most if most is not None and grown[most] >= pace.bytes_per_second * pace.seconds / 3 else None
