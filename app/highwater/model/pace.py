"""The pace at which a rank's device fills, for people, forecasts and the policy alike. Pure.

It is the slope of the longest window of readings that lie on a straight line, since the last reset, mark or change of
the engine's state. It is unknown where no window is straight: in noise, after a change of pace, as memory levels off.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Final, NamedTuple, TypeAlias

from highwater.model.units import KIB

FLAT_SECONDS = 15.0
SLOWEST_BYTES_PER_SECOND = 64 * KIB  # slower is noise
_MIN_READINGS, _ENOUGH_READINGS, _MAX_BLOCKS = 4, 8, 24
_TAIL_SECONDS = 3.0
# Up to that share of the growth above its lowest memory rests.
_REST_SHARE: Final = 1 / 20
# Errors of a wave are like their neighbours' by so much, and more than that share of the growth.
_WAVY, _EXACT = 0.6, 1e-5
# A slope over its standard error; the least ratio of neighbouring parts' paces, with few readings; and of the newest's.
_MIN_CERTAINTY, _EVEN, _EVEN_OF_FEW, _GOES_ON = 8.0, 0.75, 0.9, 0.8

_Points: TypeAlias = Sequence[tuple[float, float]]


class Patience(NamedTuple):
    """The windows, in seconds, that a pace is looked for in, the longest first; the last one is the least watched."""

    windows: tuple[float, ...]
    is_strict: bool = True


STEADY: Final = Patience((600.0, 420.0, 300.0, 210.0, 150.0, 105.0, 75.0, 60.0, 45.0, 30.0, 21.0, 15.0, 10.0, 7.0, 5.0))
# What the policy looks closer by: the last readings, through resets, whether they lie on a line or not.
HASTY: Final = Patience((0.5,), is_strict=False)


@dataclass(frozen=True)
class Track:
    """A rank's recent readings, of one process, oldest first; times are monotonic seconds.

    ``used`` are the device's bytes at the times ``at``, and ``part`` returns a component's. ``cut_at`` is the last
    reset, mark or change of the engine's state; ``reliefs`` are the times when remedies gave memory back, and
    ``policy_reliefs`` those when the policy did.
    """

    at: Sequence[float]
    used: Sequence[float]
    cut_at: float = -math.inf
    reliefs: Sequence[float] = ()
    policy_reliefs: Sequence[float] = ()
    part: Callable[[str], Sequence[float]] = lambda _: ()

    @cached_property
    def start(self) -> int:
        """The first reading since the cut: one of that very moment is of before it, as what a relief gave back is."""
        return bisect_right(self.at, self.cut_at)

    @cached_property
    def _sums(self) -> list[list[float]]:
        return [[0.0, *accumulate(value - values[0] for value in values)] for values in (self.at, self.used)]

    def blocks(self, first: int, most: int) -> _Points:
        """Return mean times and bytes of the readings from ``first`` on, in at most so many blocks of equal time."""
        at, (times, sizes) = self.at, self._sums
        count = min(len(at) - first, most)
        width = (at[-1] - at[first]) / count
        edges = [first, *(bisect_left(at, at[first] + width * number, first) for number in range(1, count)), len(at)]
        return [
            (at[0] + (times[end] - times[one]) / (end - one), self.used[0] + (sizes[end] - sizes[one]) / (end - one))
            for one, end in pairwise(edges)
            if end > one
        ]


NO_TRACK: Final = Track((), ())


class Pace(NamedTuple):
    """A pace, and the line that it is of."""

    bytes_per_second: float
    first: int = 0  # the first reading of its window
    seconds: float = 0.0  # the length of the window
    now: float = 0.0  # the used bytes now, by the line
    late: float = 0.0  # the pace now, as it bends
    bend: float = 0.0  # by what share of itself it surely grows each second, negative where it slackens
    # By how many seconds of its pace memory is off the line after a second, by chance; after four by twice as many.
    wander: float = 0.0
    is_kinked: bool = False  # it has slackened before: memory may be levelling off
    is_wavy: bool = False  # readings are above the line for long, and then below it


def pace_of(track: Track, patience: Patience = STEADY) -> Pace | None:
    at = track.at
    start = began(track) if patience.is_strict else 0
    if patience.is_strict and _is_flat(track, track.start, SLOWEST_BYTES_PER_SECOND):
        return Pace(0.0)
    tried, is_kinked = -1, False
    for window in patience.windows:
        first = max(start, bisect_right(at, at[-1] - window) - 1) if at else 0
        if len(at) - first < 2 or at[-1] - at[first] < patience.windows[-1]:  # noqa: PLR2004 - a line has two points
            return None
        if not patience.is_strict:
            return Pace((track.used[-1] - track.used[first]) / (at[-1] - at[first]), first)
        # Beside a longer history a few readings lie on a line by chance.
        if len(at) - first < (_MIN_READINGS if first == start else _ENOUGH_READINGS):
            return None
        if first != tried:
            tried, line = first, _Line(track, first)
            if line.certainty >= _MIN_CERTAINTY * (1 if first == start else 2) and line.is_even and line.goes_on:
                return line.pace(is_kinked=is_kinked)
            is_kinked = is_kinked or line.ratio < 1
    return None


def began(track: Track) -> int:
    """Return the reading since the last cut at which the growth began, after any rest or fall."""
    at, start = track.at, track.start
    used = track.used[start:]
    low = min(used, default=0.0)
    most = low + (used[-1] - low) * _REST_SHARE if used else 0.0
    last = start + max((place for place, one in enumerate(used) if one <= most), default=0)
    # The first twentieth of a ramp is no rest.
    return last if used and at[last] - at[start] > 2 * _REST_SHARE * (at[-1] - at[start]) else start


class _Line:
    def __init__(self, track: Track, first: int) -> None:
        self._track, self._first = track, first
        self._seconds = track.at[-1] - track.at[first]
        blocks, thirds = track.blocks(first, _MAX_BLOCKS), track.blocks(first, 3)
        self._count = len(blocks)
        self.slope, error, scatter, alike = _fitted(blocks)
        self.is_wavy = alike > _WAVY and scatter > _EXACT * abs(self.slope) * self._seconds
        self.wander = _wander(blocks, self.slope) / max(abs(self.slope), 1e-9)
        # Of few readings many lie on a line by chance.
        self.certainty = abs(self.slope) / max(error, 1e-9) / (1 + 4 / max(self._count - 2, 1))
        paces = [(used - earlier) / (at - before) for (before, earlier), (at, used) in pairwise(thirds)]
        self._late, self._pace_late = thirds[-1], paces[-1]
        self.ratio = paces[1] / paces[0] if len(paces) > 1 and paces[0] * paces[1] > 0 else 0.0
        # A bend adds to the noise that the fit leaves, and hardly to that from block to block.
        bends = [a - 2 * b + c for (_, a), (_, b), (_, c) in zip(blocks, blocks[1:], blocks[2:], strict=False)]
        noise = math.sqrt(sum(bend * bend for bend in bends) / max(len(bends), 1) / 6 / self._count)
        self._doubt = 12.7 * noise / self._seconds / max(abs(self.slope), 1e-9)  # the standard error of the ratio

    @property
    def is_even(self) -> bool:
        least = _EVEN if self._count >= _ENOUGH_READINGS else _EVEN_OF_FEW
        return least <= self.ratio <= 1 / least

    @property
    def goes_on(self) -> bool:
        track, at = self._track, self._track.at
        if _is_flat(track, self._first, abs(self.slope) / 4):
            return False
        for seconds in (min(_TAIL_SECONDS, self._seconds / 2), self._seconds / 3):
            tail = min(bisect_left(at, at[-1] - seconds), len(at) - _MIN_READINGS)
            slope, error, *_ = _fitted(track.blocks(tail, _MAX_BLOCKS))
            ratio, doubt = slope / self.slope, 2 * error / abs(self.slope)
            if ratio + doubt < _GOES_ON or ratio - doubt > 1 / _GOES_ON:
                return False
        return True

    def pace(self, *, is_kinked: bool) -> Pace:
        at, used = self._late
        bend = 0.0
        if self.ratio < (1 if is_kinked else 1 - self._doubt) or self.ratio > 1 + 3 * self._doubt:
            bend = 3 * math.log(self.ratio) / self._seconds
        late = self._pace_late * math.exp(bend * self._seconds / 3)
        now = used + self.slope * (self._track.at[-1] - at)
        return Pace(
            self.slope,
            self._first,
            self._seconds,
            now,
            late,
            bend,
            self.wander,
            is_kinked=is_kinked,
            is_wavy=self.is_wavy,
        )


def _is_flat(track: Track, start: int, slower_than: float) -> bool:
    first = bisect_right(track.at, track.at[-1] - FLAT_SECONDS) - 1 if len(track.at) - start >= _MIN_READINGS else -1
    return first >= start and max(track.used[first:]) - min(track.used[first:]) < slower_than * FLAT_SECONDS


def _wander(points: _Points, slope: float) -> float:
    """Return by how many bytes they go astray in a second, as a random walk does: noise does not add up."""
    squares = [
        fmean([(used - earlier - slope * (at - before)) ** 2 for (before, earlier), (at, used) in pairs] or [0.0])
        for pairs in (zip(points, points[lag:], strict=False) for lag in (1, 2, 4))
    ]
    added = max(squares[1] - squares[0], (squares[2] - squares[0]) / 3, 0.0)
    return math.sqrt(added * len(points) / max(points[-1][0] - points[0][0], 1e-9))


def _fitted(points: _Points) -> tuple[float, float, float, float]:
    """Return a least-squares slope, its standard error, the scatter, and how far errors are like their neighbours."""
    at, used = fmean(at for at, _ in points), fmean(used for _, used in points)
    width = sum((one - at) ** 2 for one, _ in points)
    if len(points) < 3 or not width:  # noqa: PLR2004 - through two points there is always a line
        return 0.0, math.inf, math.inf, 0.0
    slope = sum((one - at) * (size - used) for one, size in points) / width
    errors = [size - used - slope * (one - at) for one, size in points]
    square = sum(error * error for error in errors)
    alike = min(max(sum(a * b for a, b in pairwise(errors)) / square, 0.0), 0.9) if square else 0.0
    variance = square / (len(points) - 2)
    # Errors that are like their neighbours' count less.
    return slope, math.sqrt(variance / width * (1 + alike) / (1 - alike)), math.sqrt(variance), alike
