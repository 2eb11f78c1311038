"""Idle floors: what a series holds while no request runs or waits. Pure; no I/O, no clock.

Only such values are compared: under load a series shows the load. Floors are thinned by age, so that a day fits into a
bounded number of them: the older, the further apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from highwater.readings import GrowthDriver, GrowthUnit
from highwater.units import KIB, MIB

MAX_FLOORS: Final = 240
_NEWEST_KEPT, _OLDEST_KEPT = 48, 4
HOUR_SECONDS: Final = 3600.0
KILO: Final = 1000.0


class Floor(NamedTuple):
    """One value of a series at rest, and what the engine had done until then; NaN where that is not known.

    Attributes:
        at: Monotonic seconds since the machine's boot.
        wall: Unix seconds.
        value: Bytes, or a count.
        requests: Requests that ended so far.
        images: Images and other multimodal items so far.
        new_images: Those of them that the processor cache did not hold.
        tokens: Prompt and generated tokens so far.
    """

    at: float
    wall: float
    value: float
    requests: float = math.nan
    images: float = math.nan
    new_images: float = math.nan
    tokens: float = math.nan

    def progress(self, driver: GrowthDriver) -> float:
        """Return how far the driver has come, in its own unit; NaN where it is not known."""
        if driver == "hour":
            return self.at / HOUR_SECONDS
        if driver == "1k_tokens":
            return self.tokens / KILO
        return self[_FIELDS[driver]]


_FIELDS: Final[Mapping[str, int]] = {"request": 3, "image": 4, "new_image": 5}


@dataclass(frozen=True, slots=True)
class Scale:
    """The thresholds of a unit below which nothing is judged.

    Attributes:
        min_growth: Less than that in all is no growth.
        grain: Differences of this size are the allocator's, or the kernel's.
    """

    min_growth: float
    grain: float


SCALES: Final[Mapping[GrowthUnit, Scale]] = {
    "bytes": Scale(min_growth=float(MIB), grain=64.0 * KIB),
    "count": Scale(min_growth=16.0, grain=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An upper limit of growth by design.

    Attributes:
        limit: The value up to which growth is by design; with ``is_above_start`` by how much the series may grow.
        what: Whose limit it is, in words: ``encoder cache budget``.
        drivers: What fills it; empty: whatever does. Growth that follows another driver is not this one's.
    """

    limit: float
    what: str
    drivers: frozenset[GrowthDriver] = frozenset()
    is_above_start: bool = False

    def from_start(self, value: float) -> Bound:
        """Return the bound as a value of the series, by what it was at its start."""
        return replace(self, limit=self.limit + value, is_above_start=False) if self.is_above_start else self


class Happening(NamedTuple):
    """Something that may have made a step.

    Attributes:
        at: Monotonic seconds, as in a floor.
        what: In words, as part of a sentence: ``reset_encoder_cache by the policy``.
        is_reset: It may have lowered the series.
    """

    at: float
    what: str
    is_reset: bool = False


def superfluous(times: Sequence[float]) -> int:
    """Return which of too many floors to drop: the one whose gap is the smallest for its age.

    The newest ones and the first few are kept, because verdicts need the latter for what the series was at its start.

    Args:
        times: When each was taken, oldest first; more than ``_NEWEST_KEPT + _OLDEST_KEPT``.
    """
    now = times[-1]
    middle = range(_OLDEST_KEPT, len(times) - _NEWEST_KEPT)
    return min(middle, key=lambda i: (times[i + 1] - times[i - 1]) / max(now - times[i], 1.0))


def binned(floors: Sequence[Floor], most: int) -> list[Floor]:
    """Return at most so many floors, each the one of its neighbours with the middle value; outliers are dropped."""
    if len(floors) <= most:
        return list(floors)
    edges = [round(i * len(floors) / most) for i in range(most + 1)]
    parts = (floors[low:high] for low, high in pairwise(edges))
    return [sorted(part, key=_value)[(len(part) - 1) // 2] for part in parts]


def _value(floor: Floor) -> float:
    return floor.value
