"""The last minutes of host memory: what grew in the engine's container, how full it was, and when it is full.

And the kernel's kills for memory, by the counters of control groups: a killed process leaves nothing in its log. A
group counts the processes that ran in it, whichever limit was met, the container's or the machine's. So only groups
count in which a process of the engine runs or has run: in a pod the sidecar's own is another container's. Version 2
counts groups below as well, but one that holds processes has none below that count memory (cgroup-v2.rst, "No Internal
Process Constraint").

All that is kept here, because what processes leave of themselves, and a container's counter, may be gone with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Final, NamedTuple, TypeAlias

from highwater.host.needs import ProcessorCaches
from highwater.host.reading import ContainerMemory, HostReading, ProcessMemory
from highwater.host.report import NO_OUTLOOK, NOTABLE_RATIO, GrownPart, OomKills, Outlook, parts_of
from highwater.model.growth import seconds_until
from highwater.model.rank import Process, RankReading
from highwater.model.units import MIB, counted
from highwater.process.clocks import SYSTEM, Clocks

# Until now, of every part; its first value is kept apart from these.
SPAN_SECONDS: Final = 300.0
FULLEST_SECONDS: Final = 60.0
STEP_SECONDS: Final = 4.0
MAX_PARTS, MAX_FILLS = 128, 128
# One whose growth began in the first part of its time has grown all the time.
STEADY_RATIO: Final = 0.25
# A process writes once a second. Under pressure it waits for memory before it is killed.
MISSED_WRITE_SECONDS, TOGETHER_SECONDS = 2.5, 3.0
# An engine that ends by itself does so soon after the first of its processes; a probe fails several times before.
OWN_END_SECONDS = 20.0
# An age is by one clock and the time by another: the same look seems to be of another moment each time.
SAME_SECONDS: Final = 0.5

_Key: TypeAlias = tuple[str, int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Host memory in use at one moment: of the container by what it keeps, without a limit of the machine."""

    at: float
    used_bytes: int
    whole_bytes: int
    is_limited: bool = True
    container: str | None = None  # its key

    @property
    def ratio(self) -> float:
        return self.used_bytes / self.whole_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Host memory as it is known when something has happened to the engine.

    Attributes:
        reading: Made after it happened, with what the dead have left.
        fullest: The fullest moment of the minute before the last sign of the engine; ``None``: not known.
        parts: What the container could not drop, by the last value of each: the one that grew most first, and of those
            that did not grow the largest.
        ended_together: How many processes wrote for the last time at one moment, where that were all of one container.
    """

    reading: HostReading
    fullest: Fill | None = None
    parts: tuple[GrownPart, ...] = ()
    ended_together: int = 0
    caches: ProcessorCaches

    @property
    def suspect(self) -> GrownPart | None:
        return next(iter(self.parts), None)


class _Course:
    def __init__(self, part: GrownPart) -> None:
        self.seen_at = part.at
        self._part = part
        self._values: list[tuple[float, int]] = [(part.at, part.bytes)]

    @property
    def last_at(self) -> float:
        return self._values[-1][0]

    def begin(self) -> None:
        del self._values[:-1]

    def add(self, part: GrownPart) -> None:
        if part.at <= self.last_at + SAME_SECONDS:
            return  # the same look, or an older one
        self._part = part
        values = self._values
        if len(values) > 2 and values[-1][0] - values[-2][0] < STEP_SECONDS:  # noqa: PLR2004 - the first one stays
            values.pop()
        values.append((part.at, part.bytes))
        while len(values) > 2 and part.at - values[1][0] > SPAN_SECONDS:  # noqa: PLR2004 - the first one stays
            del values[1]

    def grown(self) -> GrownPart:
        """Return the part with its growth: from the moment at which it began, if it stood still for long before."""
        (first_at, first), (last_at, last) = self._values[0], self._values[-1]
        if last <= first:
            return self._part
        slightly = first + NOTABLE_RATIO * (last - first)
        began_at, before = next(one for one in reversed(self._values) if one[1] <= slightly)
        if began_at - first_at <= STEADY_RATIO * (last_at - first_at):
            began_at, before = first_at, first
        return replace(self._part, grown_bytes=last - before, seconds=last_at - began_at)


class HostPast:
    """The values of the last minutes. Bounded, whatever the files say."""

    def __init__(self) -> None:
        self._courses: dict[_Key, _Course] = {}
        # By container and second: what the dead have left is seen again with every reading.
        self._fills: dict[tuple[str, int], Fill] = {}

    def begin(self) -> None:
        for course in self._courses.values():
            course.begin()

    def add(self, reading: HostReading) -> None:
        for key, part in (*_processes_in(reading.ended, reading.taken_at), *_parts_in(reading)):
            self._courses.setdefault(key, _Course(part)).add(part)  # of the same look again nothing is added
        newest = sorted(self._courses, key=lambda key: -self._courses[key].last_at)[:MAX_PARTS]
        since = reading.taken_at - 2 * SPAN_SECONDS
        self._courses = {key: self._courses[key] for key in newest if self._courses[key].last_at >= since}
        fills, containers = dict(self._fills), list(containers_of_engine(reading))
        for one in containers:
            if one.limit_bytes and one.kept_bytes is not None:
                at = reading.taken_at - one.age_seconds
                fill = Fill(at=at, used_bytes=one.kept_bytes, whole_bytes=one.limit_bytes, container=one.key)
                fills[one.key, round(at)] = fill
        machine = reading.machine
        is_unlimited = reading.processes and not any(one.limit_bytes for one in containers)
        if is_unlimited and machine.total_bytes and machine.available_bytes is not None:
            used = machine.total_bytes - machine.available_bytes
            fill = Fill(at=reading.taken_at, used_bytes=used, whole_bytes=machine.total_bytes, is_limited=False)
            fills["", round(fill.at)] = fill
        newest_first = sorted(fills.items(), key=lambda item: -item[1].at)
        self._fills = dict(newest_first[:MAX_FILLS])

    def present_parts(self, reading: HostReading) -> tuple[GrownPart, ...]:
        """As ``HostFacts.parts``, of this reading, which is the last one that was added."""
        return _most_grown_first(self._courses[key] for key, _ in _parts_in(reading) if key in self._courses)

    def facts(self, reading: HostReading, caches: ProcessorCaches) -> HostFacts:
        """Return what is known at this reading, which is the last one that was added."""
        files = [one for one in (*reading.processes, *reading.ended) if one.source == "file"]
        # Those of the next life, which loads already, were first seen later than this.
        silent = [one.age_seconds for one in files if MISSED_WRITE_SECONDS <= one.age_seconds <= FULLEST_SECONDS]
        silent_at = reading.taken_at - min(silent, default=0.0)
        courses = {key: one for key, one in self._courses.items() if one.seen_at <= silent_at + SAME_SECONDS}
        # A process that was seen before, and has outlived it, is of the engine too.
        ended_at = max((one.last_at for (_, pid, _), one in courses.items() if pid is not None), default=silent_at)
        since = ended_at - FULLEST_SECONDS
        fills = [one for one in self._fills.values() if since <= one.at <= ended_at + SAME_SECONDS]
        return HostFacts(
            reading=reading,
            fullest=max(fills, key=lambda fill: fill.ratio, default=None),
            parts=_most_grown_first(one for one in courses.values() if one.last_at >= since),
            ended_together=_ended_together(files),
            caches=caches,
        )


def _most_grown_first(courses: Iterable[_Course]) -> tuple[GrownPart, ...]:
    parts = [course.grown() for course in courses]
    return tuple(sorted(parts, key=lambda part: (-part.grown_bytes if part.has_grown else 0, -part.bytes)))


def _processes_in(processes: Iterable[ProcessMemory], taken_at: float) -> Iterator[tuple[_Key, GrownPart]]:
    for one in processes:
        if one.anonymous_bytes is not None:
            part = GrownPart(
                kind="process",
                name=one.name,
                role=one.role,
                pid=one.pid,
                bytes=one.anonymous_bytes + (one.swap_bytes or 0),
                at=taken_at - one.age_seconds,
            )
            yield (one.host or "", one.pid, one.started), part


def _parts_in(reading: HostReading) -> Iterator[tuple[_Key, GrownPart]]:
    yield from _processes_in(reading.processes, reading.taken_at)
    container = reading.container
    if container is not None:
        at = reading.taken_at - container.age_seconds
        for row in parts_of(reading).rows:
            if row.kind != "process" and not row.can_be_dropped:
                key = (f"{container.key} {row.name}", None, None)
                yield key, GrownPart(kind=row.kind, name=row.name, bytes=row.bytes, at=at)


def _ended_together(files: Iterable[ProcessMemory]) -> int:
    ages_of: dict[str | None, list[float]] = {}
    for one in files:
        if one.age_seconds <= FULLEST_SECONDS:
            ages_of.setdefault(one.container, []).append(one.age_seconds)
    for known in ages_of.values():
        ages = [age for age in known if age <= min(known) + OWN_END_SECONDS]  # one that was stopped is silent for long
        if len(ages) > 1 and min(ages) >= MISSED_WRITE_SECONDS and max(ages) - min(ages) <= TOGETHER_SECONDS:
            return len(ages)
    return 0


def containers_of_engine(reading: HostReading) -> Iterator[ContainerMemory]:
    keys = {one.container for one in (*reading.processes, *reading.ended)}
    ended = (one.last_container for one in reading.ended)
    for one in (*reading.containers, *ended):
        if one is not None and one.key in keys:
            yield one


# --- the pace ---

WINDOW_SECONDS = 300.0
MIN_WINDOW_SECONDS = 60.0
MIN_SLOPE = MIB / 60.0
"""Bytes a second; for slower growth no time is named."""
MAX_SECONDS = 7 * 86_400.0


class OutlookWindow:
    def __init__(self) -> None:
        self._key: str | None = None
        self._values: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        self._values.clear()

    def add(self, now: float, container: ContainerMemory | None) -> Outlook:
        """Add a container's value at a monotonic time, and return the outlook; another container starts anew."""
        if container is None or container.kept_bytes is None:
            return NO_OUTLOOK
        if container.key != self._key:
            self._key = container.key
            self._values.clear()
        self._values.append((now, container.kept_bytes))
        while now - self._values[0][0] > WINDOW_SECONDS:
            self._values.popleft()
        window = now - self._values[0][0]
        if window < MIN_WINDOW_SECONDS:
            return Outlook(window_seconds=window)
        slope = linear_regression(*zip(*self._values, strict=True)).slope
        return Outlook(
            bytes_per_second=slope,
            seconds_to_limit=seconds_until(container.room_bytes, slope, slowest=MIN_SLOPE, horizon=MAX_SECONDS),
            window_seconds=window,
        )


# --- the kernel's kills for memory ---


# An earlier kill is another matter.
RECENT_SECONDS: Final = 60.0
TOLD_SECONDS: Final = 3600.0
_BY_CONTAINER: Final = "counted in the engine's container"
_MAX_RISES, _MAX_GROUPS = 64, 256
_Known: TypeAlias = tuple[int, Process | None]  # a counter, and the rank's process that reported it


class _Rise(NamedTuple):
    at: float
    group: str
    kills: OomKills


class OomKillWatch:
    """``tell`` is given a sentence for each rise of the total, whichever counter showed it."""

    def __init__(self, clocks: Clocks = SYSTEM, tell: Callable[[str], object] = lambda _: None) -> None:
        # Kills since this sidecar began; `None` before any counter of the engine was read.
        self.total: int | None = None
        self._clock = clocks.monotonic
        self._counts: dict[str, _Known] = {}
        self._rises: deque[_Rise] = deque(maxlen=_MAX_RISES)
        self._has_looked = self._is_container_counted = False
        self._tell = tell
        self._told: deque[tuple[float, OomKills]] = deque(maxlen=_MAX_RISES)  # what has been added to the total

    @property
    def last_hour(self) -> OomKills:
        now = self._clock()
        told = [(now - at, kills) for at, kills in self._told if now - at <= TOLD_SECONDS]
        if not told:
            return OomKills()
        seconds, last = told[-1]
        return OomKills(count=sum(kills.count for _, kills in told), where=last.where, seconds_ago=seconds)

    def notice(self, ranks: Iterable[RankReading]) -> None:
        """Compare the counters that the ranks report with their last values. Ranks of one container tell one kill."""
        rises = [OomKills(count=0, where="")]
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
                rises.append(OomKills(count=count if is_anew else rise, where=where))
        # Containers tell them too, where processes write files.
        if not self._is_container_counted and len(rises) > 1:
            self._add(max(rises, key=lambda kills: kills.count))

    def look(self, reading: HostReading) -> None:
        alive = {one.container for one in reading.processes if one.age_seconds < MISSED_WRITE_SECONDS}
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
            self._add(OomKills(count=rise, where=_BY_CONTAINER))
        self._has_looked, self._is_container_counted = True, self._is_container_counted or bool(highest)

    def _add(self, kills: OomKills) -> None:
        self.total = (self.total or 0) + kills.count
        if kills.count:
            self._told.append((self._clock(), kills))
            killed = counted(kills.count, "process")
            self._tell(f"the kernel has killed {killed} of the engine's container for memory ({kills.where})")

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
        "oom_kill" in one.events and (one.sees == "sidecar" or first >= one.age_seconds + MISSED_WRITE_SECONDS)
        for one in containers_of_engine(reading)
        if newest is not None and one.key == newest.container
    )
