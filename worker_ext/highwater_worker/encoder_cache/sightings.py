"""Ages of encoder outputs, counted from their first sighting.

No engine records when an entry was made. An age here counts from the first call that saw the entry: a lower bound,
exact to the time between two calls.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAXIMUM = 100_000


class Sightings:
    """Remembers when each entry was first seen; forgets entries that are gone.

    Args:
        clock: Seconds that only grow.
        maximum: The number of entries remembered; the age of one above that is 0 at every call.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, maximum: int = _MAXIMUM) -> None:
        self._clock = clock
        self._maximum = maximum
        self._first: dict[str, tuple[object, float]] = {}

    def ages(self, living: Mapping[str, object]) -> dict[str, float]:
        """Return the seconds since each living entry was first seen.

        Args:
            living: By mm_hash, the identity of its storage: an entry made anew under its old hash starts again at 0.
        """
        now = self._clock()
        first: dict[str, tuple[object, float]] = {}
        ages: dict[str, float] = {}
        for mm_hash, storage in living.items():
            seen = self._first.get(mm_hash)
            if seen is None or seen[0] != storage:
                seen = (storage, now)
            if len(first) < self._maximum:
                first[mm_hash] = seen
            ages[mm_hash] = now - seen[1]
        self._first = first
        return ages
