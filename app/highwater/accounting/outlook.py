"""Finds in a report the rank that is worst off, and where high water stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from highwater.accounting.rank_key import rank_key
from highwater.accounting.remedies import GAIN_FIELDS
from highwater.readings.policy import RankPressure, RuleStatus
from highwater.readings.rank import RankReading
from highwater.readings.report import Report


def fullest(ranks: Iterable[RankReading]) -> list[RankReading]:
    return sorted(ranks, key=lambda rank: -(rank.used_ratio if rank.used_ratio is not None else -1.0))


def pressure_of(report: Report, rank: RankReading) -> RankPressure | None:
    """Return the rank's pressure by the rule that acts first on its device; ``None`` without such a rule."""
    key = rank_key(rank)
    own = [
        pressure
        for rule in (report.policy.rules if report.policy is not None else ())
        for pressure in rule.ranks
        if rank_key(pressure) == key and pressure.high_free_bytes is not None
    ]
    return max(own, key=lambda pressure: pressure.high_free_bytes or 0, default=None)


def mark_of(report: Report, rank: RankReading) -> float | None:
    pressure = pressure_of(report, rank)
    if pressure is None or pressure.high_free_bytes is None or not rank.total_bytes:
        return None
    return 1.0 - pressure.high_free_bytes / rank.total_bytes


def short_ranks(rule: RuleStatus) -> list[RankPressure]:
    return sorted((rank for rank in rule.ranks if rank.short_bytes), key=lambda rank: -(rank.short_bytes or 0))


def gains(rank: RankPressure) -> dict[str, int | None]:
    return {name: getattr(rank, field) for name, field in GAIN_FIELDS.items()}


def can_give(ranks: Iterable[RankPressure]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for rank in ranks:
        sizes.update({name: size or 0 for name, size in gains(rank).items()})
    return {name: size for name, size in sizes.items() if size > 0}


def seconds_to_high_water(report: Report) -> float | None:
    """Return when the first rank reaches high water; ``None`` if not within a day, or if one is there already."""
    pressures = [pressure for rank in report.ranks if (pressure := pressure_of(report, rank)) is not None]
    if report.stale or any(pressure.short_bytes for pressure in pressures):
        return None
    seconds = (pressure.seconds_to_high_water for pressure in pressures)
    return min((left for left in seconds if left is not None), default=None)
