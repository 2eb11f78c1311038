"""The kernel's kills for memory, by the counters of control groups: a killed process leaves nothing in its log.

A group counts the processes that ran in it, whichever limit was met, the container's or the machine's. So only groups
count in which a process of the engine runs or has run: in a pod the sidecar's own is another container's. Version 2
counts groups below as well, but one that holds processes has none below that count memory (cgroup-v2.rst, "No Internal
Process Constraint"). The counter of a container is gone with it; what rose is kept here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from highwater.host.past import OWN_END_SECONDS, SILENT_SECONDS, containers_of_engine
from highwater.host.reading import ContainerMemory, HostReading
from highwater.model.rank import Process, RankReading
from highwater.process.clocks import SYSTEM, Clocks

# An earlier kill is another matter.
RECENT_SECONDS: Final = 60.0
_BY_CONTAINER: Final = "counted in the engine's container"
_MAX_RISES, _MAX_GROUPS = 64, 256
_Known: TypeAlias = tuple[int, Process | None]  # a counter, and the rank's process that reported it


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the kernel killed for memory, by a control group's own counter."""

    count: int  # kills in the last minute; 0 where the counter was read after the engine's end and has not moved
    where: str  # the place of that counter, as a clause that can stand within a sentence


class _Rise(NamedTuple):
    at: float
    group: str
    kills: OomKills


class OomKillWatch:
    def __init__(self, clocks: Clocks = SYSTEM) -> None:
        # Kills since this sidecar began; `None` before any counter of the engine was read.
        self.total: int | None = None
        self._clock = clocks.monotonic
        self._counts: dict[str, _Known] = {}
        self._rises: deque[_Rise] = deque(maxlen=_MAX_RISES)
        self._has_looked = self._is_container_counted = False

    def notice(self, ranks: Iterable[RankReading]) -> None:
        """Compare the counters that the ranks report with their last values. Ranks of one container tell one kill."""
        rises = [0]
        for rank in ranks:
            count, name = rank.host_memory.cgroup_oom_kills, rank.label
            if count is not None:
                process = rank.process
                before, was = self._counts.get(f"rank {name}", (count, process))
                # A newer container than its last one's: pids, and counters, begin again.
                has_moved = was is not None and process != was and process.host == was.host
                is_anew = has_moved and (process.pid or 0) <= (0 if was is None else was.pid or 0)
                where, known = f"counted where rank {name} runs", (count, process)
                rise = self._note(f"rank {name}", where, count if is_anew else before, known)
                rises.append(count if is_anew else rise)
        # Containers tell them too, where processes write files.
        if not self._is_container_counted and len(rises) > 1:
            self.total = (self.total or 0) + max(rises)

    def look(self, reading: HostReading) -> None:
        alive = {one.container for one in reading.processes if one.age_seconds < SILENT_SECONDS}
        # Of one container there may be many looks, which its processes have left: a counter never falls.
        highest: dict[str, tuple[int, ContainerMemory]] = {}
        for one in containers_of_engine(reading):
            count = one.events.get("oom_kill", -1)
            if count > highest.get(one.key, (-1, one))[0]:
                highest[one.key] = count, one
        for key, (count, one) in highest.items():
            # What was counted before this sidecar began is history, unless a container has just ended full.
            is_seen = self._has_looked or one.age_seconds <= RECENT_SECONDS
            has_ended_full = key not in alive and one.is_nearly_full and is_seen
            unseen = 0 if has_ended_full or (self._has_looked and one.is_private) else count
            before, _ = self._counts.get(key, (unseen, None))
            rise = self._note(key, _BY_CONTAINER, before, (count, None), one.age_seconds)
            self.total = (self.total or 0) + rise
        self._has_looked, self._is_container_counted = True, self._is_container_counted or bool(highest)

    def _note(self, group: str, where: str, before: int, known: _Known, age_seconds: float = 0.0) -> int:
        rise = max(0, known[0] - before)
        if rise:
            self._rises.append(_Rise(self._clock() - age_seconds, group, OomKills(count=rise, where=where)))
        self._counts.pop(group, None)
        self._counts[group] = known  # the last one that was seen stands last
        if len(self._counts) > _MAX_GROUPS:
            del self._counts[next(iter(self._counts))]
        return rise

    def recent(self, reading: HostReading | None = None, alive: Iterable[RankReading] = ()) -> OomKills | None:
        """Return the kills of the last minute; ``None`` where no counter was read after the engine's end.

        ``reading`` was made after the end; ``alive`` are the ranks that have outlived it, and report their counters.
        """
        recent: dict[str, OomKills] = {}
        for at, group, kills in self._rises:
            if self._clock() - at <= RECENT_SECONDS:
                count = kills.count + (recent[group].count if group in recent else 0)
                recent[group] = OomKills(count=count, where=kills.where)
        # Several groups report the same kill: those of ranks, and the container's.
        if recent:
            return max(recent.values(), key=lambda kills: kills.count)
        if reading is not None and _is_counted_after_the_end(reading):
            return OomKills(count=0, where=_BY_CONTAINER)
        outlived = [rank for rank in alive if rank.host_memory.cgroup_oom_kills is not None]
        if not outlived:
            return None
        return OomKills(count=0, where=f"counted where {outlived[0].name} runs")


def _is_counted_after_the_end(reading: HostReading) -> bool:
    """Return whether a counter was read later than the last sign of the process that the engine's end began with.

    A process that was stopped, or helped the start, was silent long before; an older container is another life's.
    """
    everyone = (*reading.processes, *reading.ended)
    newest = max(everyone, key=lambda one: one.started or 0, default=None)
    ages = [one.age_seconds for one in everyone if newest is not None and one.container == newest.container]
    first = max((age for age in ages if age <= min(ages) + OWN_END_SECONDS), default=0.0)
    return any(
        "oom_kill" in one.events and (one.sees == "sidecar" or first >= one.age_seconds + SILENT_SECONDS)
        for one in containers_of_engine(reading)
        if newest is not None and one.key == newest.container
    )
