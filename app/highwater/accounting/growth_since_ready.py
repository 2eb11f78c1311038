"""The growth of a server's memory since it became ready, and its pace of the last minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from highwater.accounting.deltas import compare, total
from highwater.accounting.known_sizes import difference, sum_known
from highwater.accounting.rank_key import RankKey, rank_key
from highwater.accounting.time_to_full import Points, slope, time_to_full
from highwater.readings.growth import Growth
from highwater.readings.rank import RankReading


def growth_since_ready(
    baseline: Sequence[RankReading],
    ranks: Sequence[RankReading],
    recent: Points,
    recent_by_rank: Mapping[RankKey, Points] = MappingProxyType({}),
) -> Growth:
    """Return the growth since ``baseline``, the slope over ``recent``, and when each device is full.

    ``baseline`` are the first readings after the engine became ready; ``recent`` the used bytes of the last minute,
    over all ranks and by rank.
    """
    grown, _ = total(compare(baseline, ranks))
    filling = tuple(time_to_full(rank, recent_by_rank.get(rank_key(rank), ())) for rank in ranks)
    return Growth(
        seconds_to_full=min((one.seconds_to_full for one in filling if one.seconds_to_full is not None), default=None),
        ranks=filling,
        since_ready_bytes=grown,
        bytes_per_second=slope(recent),
        host_since_ready_bytes=_rss_growth(baseline, ranks),
        baseline_taken_at=min((reading.taken_at for reading in baseline), default=None),
    )


def without_forecast(grown: Growth) -> Growth:
    """Return the growth without its forecast: old figures allow none."""
    return replace(grown, seconds_to_full=None, ranks=())


def _rss_growth(baseline: Sequence[RankReading], ranks: Sequence[RankReading]) -> int | None:
    earlier = {rank_key(reading): reading.host_memory.rss_bytes for reading in baseline}
    return sum_known(difference(rank.host_memory.rss_bytes, earlier.get(rank_key(rank))) for rank in ranks)
