"""What follows from a report: which rank is worst off, where high water stands, and when the memory is full. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.readings import RankReading, Report

# Slower growth is noise, and further away is no forecast.
PACE_LEAST_BYTES = 64 * 1024.0
HORIZON_SECONDS = 86_400.0


def fullest(ranks: Iterable[RankReading]) -> list[RankReading]:
    """The ranks, the fullest first; ranks whose use is not known come last."""
    return sorted(ranks, key=lambda rank: -(rank.used_ratio if rank.used_ratio is not None else -1.0))


def mark_of(report: Report, rank: RankReading | None = None) -> float | None:
    """Where the lowest high water of any rule stands on a device, as a share of it; None without such a rule.

    Args:
        report: With the rules.
        rank: Whose device; a rule on free bytes needs one.
    """
    marks = []
    for rule in report.policy.rules if report.policy is not None else ():
        if rule.signal == "device_used_ratio":
            marks.append(rule.high_water)
        elif rule.signal == "device_free_bytes" and rank is not None and rank.total_bytes:
            marks.append(1.0 - rule.high_water / rank.total_bytes)
    return min(marks, default=None)


def seconds_to_full(report: Report) -> float | None:
    """When the rank with the least free memory is full at the pace of the last minute; None if not within a day.

    The pace is known over all ranks only: each is taken to have an even share of it.
    """
    pace, free = report.growth.bytes_per_second, _free(report.ranks)
    if pace is None or not free or report.stale:
        return None
    each = pace / len(free)
    if each < PACE_LEAST_BYTES:
        return None
    seconds = min(free) / each
    return seconds if seconds <= HORIZON_SECONDS else None


def _free(ranks: Sequence[RankReading]) -> list[int]:
    return [rank.free_bytes for rank in ranks if rank.free_bytes is not None]
