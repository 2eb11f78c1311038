"""The growth of memory: its rate, and the verdict on each series of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from highwater.readings.rank import Ranked

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
    # Its pace now (accounting/pace.py): 0 where it is flat; `None` where it is not steady, or not known yet.
    bytes_per_second: float | None = None
    # The component that grows; `None` where none holds most of the growth.
    component: str | None = None
    # When its device is full at that pace; `None` where the readings do not foretell it (accounting/growth.py).
    seconds_to_full: float | None = None
    # In how many seconds memory fills again after each relief, and is given back each time; `None` where it does not.
    refill_seconds: float | None = None
    # What the encoder cache still grows by, where its budget ends that before the device is full: all else is foretold.
    cache_room_bytes: int | None = None


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

    # Since the first reading after the engine became ready, taken at `baseline_taken_at`.
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
    ranks: tuple[RankGrowth, ...] = ()
    series: tuple[SeriesGrowth, ...] = ()  # the verdict on each series of memory, the leaks first
