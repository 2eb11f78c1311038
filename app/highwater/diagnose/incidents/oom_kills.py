"""The kernel's kills for memory, by the counters of control groups: a killed process leaves nothing in its log.

A rank that survives reports the counter of its container, and so does the sidecar's own group where the engine shares
it. The counter of a container that is gone is gone with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from highwater.accounting.rank_key import rank_key
from highwater.diagnose.evidence import OomKills
from highwater.host.cgroup import oom_kill_count
from highwater.readings.rank import RankReading
from highwater.text.table import rank_title

# An earlier kill is another matter.
RECENT_SECONDS: Final = 60.0
_MAX_RISES: Final = 64
_OWN: Final = "counted in the sidecar's own control group"


class OomKillWatch:
    """Notices when a counter rises; ``read`` returns the sidecar's own."""

    def __init__(
        self, read: Callable[[], int | None] = oom_kill_count, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._rises: deque[tuple[float, OomKills]] = deque(maxlen=_MAX_RISES)

    def notice(self, ranks: Iterable[RankReading]) -> None:
        """Compare every counter that can be read now with its last value."""
        reported = {
            f"counted where rank {rank_title(*rank_key(rank))} runs": rank.host_memory.cgroup_oom_kills
            for rank in ranks
        }
        for where, count in {_OWN: self._read(), **reported}.items():
            if count is None:
                continue
            before = self._counts.get(where, count)
            if count > before:
                self._rises.append((self._clock(), OomKills(count=count - before, where=where)))
            self._counts[where] = count

    def recent(self) -> OomKills | None:
        """Return the kills of the last minute; ``None`` without any counter.

        Ranks that share a container report the same kill: the highest count is taken.
        """
        by_group = dict.fromkeys(self._counts, 0)
        for at, kills in self._rises:
            if self._clock() - at <= RECENT_SECONDS:
                by_group[kills.where] += kills.count
        where = max(by_group, key=lambda group: by_group[group], default=None)
        return None if where is None else OomKills(count=by_group[where], where=where)
