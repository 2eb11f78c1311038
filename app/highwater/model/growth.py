"""The growth of memory: its rate, and the verdict on each series of it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import sub
from statistics import fmean
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from highwater.model.components import COMPONENT_NAMES
from highwater.model.pace import NO_TRACK, SLOWEST_BYTES_PER_SECOND, STEADY, Pace, Track, began, pace_of
from highwater.model.rank import Components, Ranked, RankKey, RankReading
from highwater.model.remedies import compare, first_of_each_card, total
from highwater.model.units import MIB, difference, sum_known

# The verdict on a series of memory between requests: app/highwater/growth/judging.py.
GrowthKind: TypeAlias = Literal["flat", "plateau", "step", "leak", "not_known"]
# A leak is proportional to one of these.
GrowthDriver: TypeAlias = Literal["request", "image", "new_image", "1k_tokens", "sleep", "hour"]
GrowthUnit: TypeAlias = Literal["bytes", "count"]
# What a verdict rests on: values while no request ran, or the lowest values of windows with equal work.
GrowthGround: TypeAlias = Literal["idle_floors", "equal_work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrowth(Ranked):
    rank: int | None
    dp_rank: int | None
    # Its pace now (pace.py): 0 where it is flat; `None` where it is not steady, or not known yet.
    bytes_per_second: float | None = None
    # The component that grows; `None` where none holds most of the growth.
    component: str | None = None
    # When its device is full at that pace; `None` where the readings do not foretell it.
    seconds_to_full: float | None = None
    # In how many seconds memory fills again after each relief, and is given back each time; `None` where it does not.
    refill_seconds: float | None = None
    # What the encoder cache still grows by, where its budget ends that before the device is full: all else is foretold.
    cache_room_bytes: int | None = None
    grown: Components | None = None  # by component since the engine was ready; `None` where that is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentGrowth(Ranked):
    """The component that grew most in the last minutes, counted from its lowest value.

    Of the rank that is full first; where none is foretold to be, of the one with the least free.
    """

    rank: int | None
    dp_rank: int | None
    component: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRate:
    driver: GrowthDriver
    # Bytes, or descriptors or threads, for each unit of the driver: a request, an hour. `low` and `high` are the ends
    # of its 95 % interval.
    per_driver: float
    low: float
    high: float
    per_hour: float | None = None  # for each hour of the window, idle times included
    also: tuple[GrowthDriver, ...] = ()  # other drivers that explain the growth as well


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesGrowth:
    series: str  # its name: `rank 0 other_tensors_bytes`, `API server anonymous_bytes`
    owner: str  # the rank or process whose memory it is; `measure`: the part of it
    measure: str
    place: Literal["device", "host", "asleep"]  # `asleep`: what stays on the device after each sleep
    unit: GrowthUnit
    # `flat`; `plateau`: it levelled off, or grows to a bound that it has by design; `step`: it rose once; `leak`;
    # `not_known`.
    verdict: GrowthKind
    text: str  # one sentence: what was seen, why, and what would settle it
    ground: GrowthGround = "idle_floors"  # `equal_work` where the engine is hardly ever idle, or while that takes long
    value: float | None = None  # at the last floor, in `unit`; `grown`: since the first floor that counts
    grown: float | None = None
    rate: GrowthRate | None = None  # `None` where it does not leak
    bound: float | None = None  # the limit of a plateau by design; `bound_by`: whose limit that is
    bound_by: str | None = None
    # The size of a step; `step_at`: the Unix time of the first floor after it; `step_by`: the event nearest to it.
    step: float | None = None
    step_at: float | None = None
    step_by: str | None = None
    advice: str | None = None  # the first thing to do about it, where its cause is known
    # When a leak has used up what is left, in Unix seconds; `limit_by`: what it uses up.
    exhausted_at: float | None = None
    limit_by: str | None = None
    floors: int = 0  # the number of floors, of that ground; `window_seconds`: from the first to the last
    window_seconds: float = 0.0
    since: float | None = None  # since when the verdict is this one, in Unix seconds
    is_over: bool = False  # whether the process has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The change of used bytes, summed over the ranks that were there at both ends."""

    # Since the first reading after the engine became ready, taken at `baseline_taken_at` by this machine's clock.
    since_ready_bytes: int | None = None
    bytes_per_second: float | None = None  # the pace now; `None` where that of one device is not known
    host_since_ready_bytes: int | None = None  # the growth of the workers' resident set size (RSS) since then
    baseline_taken_at: float | None = None
    # Why growth since then is unknown; `None` where it is known, or nothing has been read yet.
    reason: str | None = None
    # When the first device is full at its pace, `component`: what grows on it; `None` where none is foretold to fill.
    seconds_to_full: float | None = None
    component: str | None = None
    refill_seconds: float | None = None  # the shortest of the ranks'
    recent: RecentGrowth | None = None  # `None` where next to nothing grew
    ranks: tuple[RankGrowth, ...] = ()
    series: tuple[SeriesGrowth, ...] = ()  # the verdict on each series of memory, the leaks first


TRACK_SECONDS: Final = STEADY.windows[0]
HORIZON_SECONDS = 86_400.0  # further away is no forecast
_WATCHED_SHARE, _WATCHED_SECONDS = 1 / 6, 60.0
# What is left must be so many times one step of the growth, and the root of the mean square off the line: a saw's teeth
# end 1.73 of these above it.
_STEPS, _SPREADS, _NOISE = 4.0, 7.0, 8.0
# So much may a forecast be off, as a share of it, by rests and, at so many standard errors, by chance; and by a bend.
_DOUBT, _WANDERS, _BENT = 0.25, 4.0, 0.2
_REST_SECONDS: Final = 3.0
_NOTABLE_BYTES: Final = 64 * MIB
_NEAR_SHARE: Final = 0.25  # of a device: with more free no rule of the policy that is derived acts on a shortage
_CACHE, _PASSED = "encoder_cache_bytes", 1.1  # beyond so many times its budget a cache is not held to it


def growth_since_ready(
    baseline: Sequence[RankReading],
    ranks: Sequence[RankReading],
    tracks: Mapping[RankKey, Track] = MappingProxyType({}),
) -> Growth:
    """Return the growth since ``baseline``, the pace over all devices, and when each of them is full.

    ``baseline`` are the first readings after the engine became ready; ``tracks`` each rank's last readings.
    """
    deltas = compare(baseline, ranks)
    grown, _ = total(deltas)
    parts = {one.key: one.components for one in deltas}
    filling = tuple(
        replace(time_to_full(rank, tracks.get(rank.key, NO_TRACK)), grown=parts.get(rank.key)) for rank in ranks
    )
    ending = (one for one in filling if one.seconds_to_full is not None)
    first = min(ending, key=lambda one: one.seconds_to_full or 0.0, default=None)
    paces = [filling[place].bytes_per_second for place in first_of_each_card(ranks)]
    known = [pace for pace in paces if pace is not None]
    rss = {reading.key: reading.host_memory.rss_bytes for reading in baseline}
    return Growth(
        seconds_to_full=None if first is None else first.seconds_to_full,
        component=None if first is None else first.component,
        refill_seconds=min((one.refill_seconds for one in filling if one.refill_seconds is not None), default=None),
        recent=_recent(ranks, tracks, None if first is None else first.key),
        ranks=filling,
        since_ready_bytes=grown,
        bytes_per_second=sum(known) if known and len(known) == len(paces) else None,
        host_since_ready_bytes=sum_known(difference(rank.host_memory.rss_bytes, rss.get(rank.key)) for rank in ranks),
    )


def without_forecast(grown: Growth) -> Growth:
    """Return the growth without its forecast: old figures allow none."""
    return replace(
        grown, seconds_to_full=None, component=None, refill_seconds=None, bytes_per_second=None, recent=None, ranks=()
    )


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
    pace, refills = pace_of(track), refill_seconds(rank, track)
    grown = RankGrowth(rank=rank.rank, dp_rank=rank.dp_rank, refill_seconds=refills)
    if pace is None:
        return grown
    grows = pace.bytes_per_second >= SLOWEST_BYTES_PER_SECOND
    grown = replace(grown, bytes_per_second=pace.bytes_per_second, component=_grower(track, pace) if grows else None)
    left = None if refills is not None else forecast(track, pace, rank.free_bytes)
    cache = track.part(_CACHE)
    budget = None if rank.encoder_cache is None else rank.encoder_cache.budget_bytes
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
    least = left * _WATCHED_SHARE
    is_watched = pace.seconds >= (least if pace.is_kinked else min(least, _WATCHED_SECONDS))
    # A line that waves tells no further than it has been watched; what wanders adds up, as images by chance do.
    is_steady = (pace.seconds >= left or not pace.is_wavy) and (
        pace.wander * math.sqrt(1 / max(left, 1e-9) + 1 / pace.seconds) <= _DOUBT / _WANDERS
    )
    # The pace, if it goes on to bend as it does, must fill the device about when the line does.
    bent = 0.0 if pace.late <= 0 else pace.bend * room / pace.late
    if pace.late <= 0 or bent <= -1:
        return None  # it slackens so much that it never does
    due = math.log1p(bent) / pace.bend if pace.bend else room / pace.late
    bends_little = (1 - _BENT) * left <= due <= (1 + _BENT) * left
    foretells = is_watched and is_steady and bends_little and _is_fine(track, pace, room)
    return left if foretells and _is_first(track, pace, left) else None


def _is_fine(track: Track, pace: Pace, room: float) -> bool:
    """Return whether steps, and what readings are off the line by, are small beside the room.

    Nor may memory have come down by itself before: it may do so again, unless it has grown for twice as long since.
    """
    at, used, first = track.at, track.used, pace.first
    step = max(map(sub, used[first + 1 :], used[first:])) - (used[-1] - used[first]) / (len(used) - 1 - first)
    ends = pace.now - pace.bytes_per_second * at[-1]
    errors = [size - ends - pace.bytes_per_second * one for one, size in zip(at[first:], used[first:], strict=True)]
    spread = math.sqrt(fmean(error * error for error in errors))
    grown = pace.bytes_per_second * pace.seconds
    start = track.start
    falls = [*map(sub, accumulate(used[start : first + 1], max), used[start : first + 1])]
    fallen = max(falls)
    # By how much memory has passed all that it was before the window. What a relief gave back comes again only where
    # the part that grows is the one that it took from.
    component = _grower(track, pace) if track.reliefs else None
    values = used if component is None else track.part(component)
    new = values[-1] - max(values[:first], default=-math.inf)
    since = at[start + falls.index(fallen)]
    # Noise falls from its highest to its lowest.
    has_outgrown = new >= fallen and at[-1] - since >= 2 * (since - at[start])
    is_new = new >= grown / 2 and (fallen <= _NOISE * spread or has_outgrown)
    return is_new and room >= max(_STEPS * step, _SPREADS * spread)


def _is_first(track: Track, pace: Pace, left: float) -> bool:
    """Return whether the growth before the window, and its rests, foretell no other pace."""
    at, now, begin = track.at, track.at[-1], began(track)
    rests, grows_from = _rests(track, begin, pace.bytes_per_second), at[begin]
    if rests and rests[0][0] <= grows_from:  # it comes before all growth, and foretells nothing
        grows_from = rests.pop(0)[1]
    if any(end - one > _DOUBT * left for one, end in rests if one >= at[pace.first]):
        return False
    earlier = [rest for rest in rests if rest[0] < at[pace.first]]
    rested = sum(end - one for one, end in earlier)
    if earlier:
        between = max((earlier[-1][1] - grows_from - rested) / len(earlier), 1.0)
        # Where a rest begins is known to two readings.
        unsure = max(_REST_SECONDS, 2 * pace.seconds / (len(at) - 1 - pace.first))
        to_come = (now + left + unsure - earlier[-1][1]) // between
        if to_come * rested / len(earlier) > _DOUBT * left:
            return False
    mean = (pace.now - track.used[begin]) / max(now - grows_from - rested, 1e-9)
    before = at[pace.first] - grows_from
    is_same = pace.first - begin <= 1 or abs(mean / pace.bytes_per_second - 1) <= _BENT
    return is_same or (pace.seconds >= max(left, before) and not earlier)


def _rests(track: Track, first: int, bytes_per_second: float) -> list[tuple[float, float]]:
    """Return the stretches, three seconds and longer, in which next to nothing was added."""
    at, used, rests = track.at, track.used, []
    low = high = used[first]
    for place in range(first, len(at) + 1):
        if place < len(at):
            low, high = min(low, used[place]), max(high, used[place])
            if high - low <= bytes_per_second * _REST_SECONDS / 4:
                continue
        if at[place - 1] - at[first] >= _REST_SECONDS:
            rests.append((at[first], at[place - 1]))
        if place < len(at):
            first, low, high = place, used[place], used[place]
    return rests


def refill_seconds(rank: RankReading, track: Track) -> float | None:
    """Return in what time memory fills again after each relief of the policy; ``None`` where it does not.

    By hand memory is given back once, and in idle times the policy does so with much free.
    """
    if len(track.policy_reliefs) < 2:  # noqa: PLR2004 - once is no rhythm
        return None
    before, last = track.policy_reliefs[-2:]
    wave, since = (
        track.used[bisect_right(track.at, begin) : bisect_right(track.at, end)]
        for begin, end in ((before, last), (last, math.inf))
    )
    if not wave or not since or track.at[-1] - last > 1.5 * (last - before):
        return None
    crest, half = max(wave), (max(wave) - min(wave)) / 2
    left = None if rank.free_bytes is None else rank.free_bytes + track.used[-1] - crest
    was_full = left is None or not rank.total_bytes or left <= _NEAR_SHARE * rank.total_bytes
    fills = min(since) <= crest - half and since[-1] <= crest + half and 2 * half >= _NOTABLE_BYTES
    return last - before if fills and was_full else None


def _recent(
    ranks: Sequence[RankReading], tracks: Mapping[RankKey, Track], first_full: RankKey | None
) -> RecentGrowth | None:
    known = [rank for rank in ranks if rank.free_bytes is not None and first_full in (None, rank.key)]
    rank = min(known, key=lambda one: one.free_bytes or 0, default=None)
    track = NO_TRACK if rank is None else tracks.get(rank.key, NO_TRACK)
    # The parts are looked up where all of them together have grown: many times a second memory is still.
    if rank is None or not track.used or track.used[-1] - min(track.used) < _NOTABLE_BYTES:
        return None
    grown: dict[str, tuple[float, float]] = {}
    for name in COMPONENT_NAMES:
        if values := track.part(name):
            lowest = len(values) - 1 - list(reversed(values)).index(min(values))
            grown[name] = values[-1] - values[lowest], track.at[-1] - track.at[lowest]
    most = max(grown, key=lambda name: grown[name][0], default=None)
    if most is None or grown[most][0] < _NOTABLE_BYTES:
        return None
    size, seconds = grown[most]
    return RecentGrowth(rank=rank.rank, dp_rank=rank.dp_rank, component=most, bytes=int(size), seconds=seconds)


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
