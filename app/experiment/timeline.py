"""An experiment's readings as charts: evenly spaced, thinned without losing a peak. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from app.attribution import COMPONENTS
from app.components import STACKED
from app.experiment.document import Lines, Tick, Timeline
from app.experiment.experiment import BEFORE, Experiment, RankKey, RankPoint
from app.table import component_title
from app.units import MIB

BINS_MOST = 240
RANKS_MOST = 4
STACK: Final = tuple(row.name for row in STACKED)
# A rank whose readings say less than this of a component is not worth a line.
SEEN_MIB = 1.0
# Closer moments than this share of the width would write over each other.
TICK_SHARE = 0.1


def timelines(e: Experiment) -> Iterator[Timeline]:
    """Two charts of each of the fullest ranks: all of its memory, and what moved."""
    for key in charted(e):
        bins = _Bins(e, key)
        if bins.is_drawn:
            # Of a rank on which nothing moved, only the first says anything.
            yield from (chart for chart in (bins.whole(), bins.moved()) if chart.lines)


def charted(e: Experiment) -> tuple[RankKey, ...]:
    """The ranks that are drawn, in their order: of many, the fullest."""
    highest = {key: max((p.used_bytes or 0 for p in points), default=0) for key, points in e.series.items()}
    fullest = sorted(highest, key=lambda key: highest[key], reverse=True)[:RANKS_MOST]
    return tuple(sorted(fullest))


def used_line(e: Experiment, most: int) -> tuple[str, float, list[float]] | None:
    """The fullest rank's used bytes in MiB in so many evenly spaced steps; its name, and the seconds they span."""
    points = max(e.series.values(), key=lambda p: max((each.used_bytes or 0 for each in p), default=0), default=())
    known = [point for point in points if point.used_bytes is not None]
    if len(known) < 2 or known[-1].at <= known[0].at:  # noqa: PLR2004 - one reading is no line
        return None
    binned = _binned(known, known[0].at, known[-1].at, min(most, len(known)))
    return known[0].name, known[-1].at - known[0].at, [(point.used_bytes or 0) / MIB for point in binned]


class _Bins:
    """One rank's readings, evenly spaced."""

    def __init__(self, e: Experiment, key: RankKey) -> None:
        self._e = e
        points = [point for point in e.series[key] if point.used_bytes is not None]
        self.is_drawn = len(points) > 2 and points[-1].at > points[0].at  # noqa: PLR2004 - two readings are no line
        if not self.is_drawn:
            return
        self._start, self._end = points[0].at, points[-1].at
        self._bins = _binned(points, self._start, self._end, min(BINS_MOST, len(points)))
        self._name = points[0].name
        before = e.moment(BEFORE)
        self._before = (before.rank(key) if before is not None else None) or points[0]

    def whole(self) -> Timeline:
        """All components on one another, up to the device's total."""
        total = self._before.total_bytes
        # On CPU the total is the machine's, of which the engine has little: it would press the areas flat.
        is_fitting = total is not None and total < 2 * max(point.used_bytes or 0 for point in self._bins)
        lines = (
            Lines(component_title(name), name, [_mib(point.part(name)) for point in self._bins])
            for name in STACK
            if name in COMPONENTS
        )
        return Timeline(
            caption=f"All memory in use, {self._name}",
            stacked=True,
            lines=[line for line in lines if max(_known(line), default=0.0) >= SEEN_MIB],
            ticks=self._ticks(),
            key=self._key(),
            seconds=self._end - self._start,
            top=(total / MIB, "total") if is_fitting and total is not None else None,
        )

    def moved(self) -> Timeline:
        """What each component has changed by since before the load."""
        names = ("used_bytes", *STACK)
        lines = [
            Lines(component_title(name), name, [self._moved(point, name) for point in self._bins]) for name in names
        ]
        return Timeline(
            caption=f"Change since before the load, {self._name}",
            stacked=False,
            lines=[line for line in lines if max(map(abs, _known(line)), default=0.0) >= SEEN_MIB],
            ticks=self._ticks(),
            key=self._key(),
            seconds=self._end - self._start,
        )

    def _moved(self, point: RankPoint, name: str) -> float | None:
        now, was = point.part(name), self._before.part(name)
        return None if now is None or was is None else (now - was) / MIB

    def _moments(self) -> list[tuple[float, str]]:
        load = self._e.load
        told = [(load.started_at, "load starts"), (load.ended_at, "load ends")]
        told += [(m.at, m.title) for m in self._e.moments if m.name.startswith("after ") and m.at is not None]
        return [(at, title) for at, title in told if self._start <= at <= self._end + 1.0]

    def _key(self) -> list[str]:
        return [title for _, title in self._moments()]

    def _ticks(self) -> list[Tick]:
        """One label for moments that stand close to each other."""
        last = len(self._bins) - 1
        span = (self._end - self._start) or 1.0
        ticks: list[Tick] = []
        for number, (at, _) in enumerate(self._moments(), 1):
            index = min(round((at - self._start) / span * last), last)
            if ticks and index - ticks[-1].index < TICK_SHARE * last:
                first = ticks[-1].label.partition("-")[0]
                ticks[-1] = Tick(ticks[-1].index, f"{first}-{number}")
            else:
                ticks.append(Tick(index, str(number)))
        return ticks


def _binned(points: Sequence[RankPoint], start: float, end: float, count: int) -> list[RankPoint]:
    """Of each bin the highest reading; one without any shows what was read before."""
    bins: list[RankPoint | None] = [None] * count
    for point in points:
        index = min(int((point.at - start) / (end - start) * count), count - 1)
        held = bins[index]
        if held is None or (point.used_bytes or 0) > (held.used_bytes or 0):
            bins[index] = point
    filled: list[RankPoint] = []
    for each in bins:
        filled.append(each or (filled[-1] if filled else points[0]))
    return filled


def _known(line: Lines) -> list[float]:
    return [value for value in line.values if value is not None]


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB
