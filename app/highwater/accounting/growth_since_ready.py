"""The growth of a server's memory since it became ready, and its pace now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from highwater.accounting.deltas import compare, total
from highwater.accounting.devices import first_of_each_card
from highwater.accounting.pace import NO_TRACK, Track
from highwater.accounting.rank_key import RankKey, rank_key
from highwater.accounting.time_to_full import time_to_full
from highwater.readings.growth import Growth
from highwater.readings.rank import RankReading
from highwater.units import difference, sum_known


def growth_since_ready(
    baseline: Sequence[RankReading],
    ranks: Sequence[RankReading],
    tracks: Mapping[RankKey, Track] = MappingProxyType({}),
) -> Growth:
    """Return the growth since ``baseline``, the pace over all devices, and when each of them is full.

    ``baseline`` are the first readings after the engine became ready; ``tracks`` each rank's last readings.
    """
    grown, _ = total(compare(baseline, ranks))
    filling = tuple(time_to_full(rank, tracks.get(rank_key(rank), NO_TRACK)) for rank in ranks)
    ending = (one for one in filling if one.seconds_to_full is not None)
    first = min(ending, key=lambda one: one.seconds_to_full or 0.0, default=None)
    paces = [filling[place].bytes_per_second for place in first_of_each_card(ranks)]
    known = [pace for pace in paces if pace is not None]
    rss = {rank_key(reading): reading.host_memory.rss_bytes for reading in baseline}
    return Growth(
        seconds_to_full=None if first is None else first.seconds_to_full,
        component=None if first is None else first.component,
        refill_seconds=min((one.refill_seconds for one in filling if one.refill_seconds is not None), default=None),
        ranks=filling,
        since_ready_bytes=grown,
        bytes_per_second=sum(known) if known and len(known) == len(paces) else None,
        host_since_ready_bytes=sum_known(
            difference(rank.host_memory.rss_bytes, rss.get(rank_key(rank))) for rank in ranks
        ),
        baseline_taken_at=min((reading.taken_at for reading in baseline), default=None),
    )


def without_forecast(grown: Growth) -> Growth:
    """Return the growth without its forecast: old figures allow none."""
    return replace(grown, seconds_to_full=None, component=None, refill_seconds=None, bytes_per_second=None, ranks=())
