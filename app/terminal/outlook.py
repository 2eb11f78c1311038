"""What follows from a report: which rank is worst off, where high water stands, and when the memory is full. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.attribution import rank_key
from app.readings import RankPressure, RankReading, Report, RuleStatus

# Slower growth is noise, and further away is no forecast.
PACE_LEAST_BYTES = 64 * 1024.0
HORIZON_SECONDS = 86_400.0


def fullest(ranks: Iterable[RankReading]) -> list[RankReading]:
    """The ranks, the fullest first; ranks whose use is not known come last."""
    return sorted(ranks, key=lambda rank: -(rank.used_ratio if rank.used_ratio is not None else -1.0))


def pressure_of(report: Report, rank: RankReading) -> RankPressure | None:
    """How the rank stands to the rule that acts first on its device; ``None`` where no rule has waters for it."""
    key = rank_key(rank)
    own = [
        one
        for rule in (report.policy.rules if report.policy is not None else ())
        for one in rule.ranks
        if (one.dp_rank or 0, one.rank or 0) == key and one.high_free_bytes is not None
    ]
    return max(own, key=lambda one: one.high_free_bytes or 0, default=None)


def mark_of(report: Report, rank: RankReading) -> float | None:
    """Where high water stands on the rank's device, as a share of it; ``None`` where no rule has one there."""
    pressure = pressure_of(report, rank)
    if pressure is None or pressure.high_free_bytes is None or not rank.total_bytes:
        return None
    return 1.0 - pressure.high_free_bytes / rank.total_bytes


def short_ranks(rule: RuleStatus) -> list[RankPressure]:
    """The ranks that have less free than the rule's high water, the worst off first."""
    return sorted((one for one in rule.ranks if one.short_bytes), key=lambda one: -(one.short_bytes or 0))


def is_dormant(rule: RuleStatus, report: Report) -> bool:
    """Whether the rule is held although the engine is at work: by its own waters, or by what is not known.

    On CPU the default rule has nothing to watch, and that is as it should be.
    """
    if rule.phase != "held" or report.stale or not report.engine.traits.takes_remedies:
        return False
    is_derived = rule.high_water is None or rule.low_water is None
    left = [one for one in report.ranks if not one.asleep_tags and not (is_derived and one.device.type == "cpu")]
    return bool(left)


def can_give(ranks: Iterable[RankPressure]) -> dict[str, int]:
    """What each remedy could give back on these ranks together, by its name, as far as the workers tell."""
    sizes = {"release": 0, "trim_encoder_cache": 0}
    for one in ranks:
        sizes["release"] += one.can_release_bytes or 0
        sizes["trim_encoder_cache"] += one.can_trim_bytes or 0
    return {name: size for name, size in sizes.items() if size > 0}


def seconds_to_full(report: Report) -> float | None:
    """When the rank with the least free memory is full at the pace of the last minute; ``None`` if not within a day."""
    return _seconds_until(report, [rank.free_bytes for rank in report.ranks if rank.free_bytes is not None])


def seconds_to_high_water(report: Report) -> float | None:
    """When the first rank is at high water at that pace; ``None`` if not within a day, or if one is there already."""
    rooms = []
    for rank in report.ranks:
        pressure = pressure_of(report, rank)
        if pressure is not None and pressure.high_free_bytes is not None and rank.free_bytes is not None:
            rooms.append(rank.free_bytes - pressure.high_free_bytes)
    return _seconds_until(report, rooms) if all(room > 0 for room in rooms) else None


def _seconds_until(report: Report, rooms: Sequence[int]) -> float | None:
    # The pace is known over all ranks only: each is taken to have an even share of it.
    pace, count = report.growth.bytes_per_second, sum(rank.free_bytes is not None for rank in report.ranks)
    if pace is None or not rooms or report.stale:
        return None
    each = pace / count
    if each < PACE_LEAST_BYTES:
        return None
    seconds = min(rooms) / each
    return seconds if seconds <= HORIZON_SECONDS else None
