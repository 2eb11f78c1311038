"""The readings beside the load, of every rank: bounded, however long the load is, and never without its peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from highwater.accounting.attribution import rank_key
from highwater.measure.experiment import Gap, RankKey
from highwater.readings import RankReading

MAX_POINTS = 4096
# A reading every second is the default; one in three that fails is no gap yet.
GAP_SECONDS, GAP_READINGS = 15.0, 3


class Series:
    """The readings of all ranks, oldest first. Of too many, the lower one of each two in a row is let go.

    Attributes:
        gaps: Times in which a rank was not read for longer than ``gap_seconds``.

    Args:
        gap_seconds: How long that may be.
    """

    def __init__(self, gap_seconds: float = GAP_SECONDS) -> None:
        self.gap_seconds = gap_seconds
        self.gaps: list[Gap] = []
        self._points: dict[RankKey, list[RankReading]] = {}

    def add(self, points: Iterable[RankReading]) -> None:
        """Keep what is newer than the last of its rank."""
        for point in points:
            kept = self._points.setdefault(rank_key(point), [])
            if kept and point.taken_at <= kept[-1].taken_at:
                continue
            if kept and point.taken_at - kept[-1].taken_at > self.gap_seconds:
                self.gaps.append(Gap(start=kept[-1].taken_at, end=point.taken_at))
            kept.append(point)
            if len(kept) > MAX_POINTS:
                pairs = zip(kept[0:-1:2], kept[1::2], strict=False)
                kept[:] = [*(_higher(*pair) for pair in pairs), kept[-1]]

    def last_at(self) -> dict[RankKey, float]:
        """Return when each rank was read last."""
        return {key: kept[-1].taken_at for key, kept in self._points.items()}

    def points(self) -> dict[RankKey, tuple[RankReading, ...]]:
        """All of them."""
        return {key: tuple(self._points[key]) for key in sorted(self._points)}

    def gaps_within(self, start: float, end: float) -> tuple[Gap, ...]:
        """Times from start to end without a reading of some rank, the longest first; each once."""
        open_ended = {Gap(start=at, end=end) for at in self.last_at().values() if end - at > self.gap_seconds}
        cut = {Gap(start=max(gap.start, start), end=min(gap.end, end)) for gap in (*self.gaps, *open_ended)}
        return tuple(sorted((gap for gap in cut if gap.seconds > 0), key=lambda gap: gap.seconds, reverse=True))


def usual_gap(moments: Sequence[float]) -> float:
    """Return from how long on a time without a reading is a gap, by the times of earlier readings."""
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    return max(GAP_SECONDS, GAP_READINGS * median(pauses)) if pauses else GAP_SECONDS


def peaks(series: Iterable[Sequence[RankReading]], start: float, end: float) -> tuple[RankReading, ...]:
    """Each rank at its highest use within that time; those that were not read in it are left out."""
    within = ([p for p in points if start <= p.taken_at <= end and p.used_bytes is not None] for points in series)
    return tuple(max(points, key=lambda point: point.used_bytes or 0) for points in within if points)


def _higher(left: RankReading, right: RankReading) -> RankReading:
    return left if (left.used_bytes or 0) > (right.used_bytes or 0) else right
