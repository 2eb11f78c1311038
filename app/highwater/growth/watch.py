"""The watch that takes floors while the engine is idle and in windows of load, and keeps a verdict on every series.

Judging is spread over the reports that follow a floor, so that hundreds of series cost no more than a few milliseconds
a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, TypeAlias

from highwater.growth.book import FloorBook, FloorFile
from highwater.growth.judging import BETWEEN_REQUESTS, WARM_UP_FLOORS, Judgement, judge, series_growth
from highwater.growth.series import (
    DEVICE_IDLE_SECONDS,
    HOST_IDLE_SECONDS,
    HOST_SAMPLE_SECONDS,
    REPEAT_SECONDS,
    WINDOW_SECONDS,
    Floor,
    Happening,
    Measured,
    Place,
    SeriesKey,
    asleep_series,
    device_series,
)
from highwater.growth.words import series_title
from highwater.model.engine import WorkCounts
from highwater.model.growth import GrowthGround, GrowthKind, SeriesGrowth
from highwater.model.rank import RankReading
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.process.errors import UnknownName, contained
from highwater.watch.history import History

# A judgement takes about a millisecond where a series moves.
JUDGED_AT_ONCE: Final = 2
_ORDER: Final[Mapping[GrowthKind, int]] = {"leak": 0, "step": 1, "plateau": 2, "not_known": 3, "flat": 4}
# An older idle floor says nothing of the present.
_RECENT_SECONDS: Final = 1200.0
_EVENTS: Final = frozenset({"reset", "state", "snapshot"})

log = logging.getLogger("highwater.growth")

HostSeries: TypeAlias = Callable[[float], Awaitable[Iterable[Measured]]]


@dataclass(frozen=True, slots=True)
class IdlePeriod:
    """The present time without requests, since a monotonic time; ``None`` while the engine works, or is not known."""

    since: float | None = None
    work: WorkCounts = field(default_factory=WorkCounts)

    def seconds(self, now: float) -> float:
        """Return its length in seconds; 0 while the engine is busy."""
        return 0.0 if self.since is None else now - self.since


def follow(idle: IdlePeriod, report: Report, now: float) -> IdlePeriod:
    """Return the idle period as of a report: it goes on while no request runs or waits, and no work was counted."""
    engine, progress = report.engine, report.progress
    is_idle = engine.requests_running == 0 and not engine.requests_waiting
    is_still = progress is None or progress.verdict in {"idle", "unknown"}
    is_awake = engine.traits.serves and not engine.traits.is_late
    if report.stale or not (is_idle and is_still and is_awake):
        return IdlePeriod(work=engine.work)
    if idle.since is None or engine.work != idle.work:
        return IdlePeriod(since=now, work=engine.work)
    return replace(idle, work=engine.work)


def follow_sleep(asleep: IdlePeriod, report: Report, now: float) -> IdlePeriod:
    """Return the time asleep as of a report; the work's count of sleeps goes up as one begins."""
    if report.engine.state != "sleeping":
        return replace(asleep, since=None)
    if asleep.since is not None:
        return asleep
    return IdlePeriod(since=now, work=replace(report.engine.work, sleeps=(asleep.work.sleeps or 0) + 1))


def is_due(idle: IdlePeriod, last: float | None, now: float, *, idle_seconds: float) -> bool:
    """Return whether a floor must be taken now, given the time of the last one and the least idle time."""
    if idle.since is None or idle.seconds(now) < idle_seconds:
        return False
    return last is None or last < idle.since or now - last >= REPEAT_SECONDS


@dataclass
class _Floors:
    """The floors of one kind."""

    ground: GrowthGround = "idle_floors"
    warm_up: int = WARM_UP_FLOORS  # so many of a start do not count
    taken: str = BETWEEN_REQUESTS  # when another one is
    book: FloorBook = field(default_factory=FloorBook)
    present: frozenset[str] = frozenset()  # the series of the newest one that this watch has taken


@dataclass
class _Window:
    """The lowest value of each series since a time, and the requests that ran or waited at each report."""

    since: float
    lowest: dict[SeriesKey, Measured] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    host_read_at: float | None = None

    def add(self, measured: Iterable[Measured]) -> None:
        for one in measured:
            value = min(one.value, self.lowest.get(one.key, one).value)
            self.lowest[one.key] = replace(one, value=value)


class GrowthWatch:
    """Verdicts on growth.

    ``host_series`` reads the host's series now, given the seconds for which the engine has been idle, or a window of
    load lasts.
    """

    def __init__(
        self,
        history: History,
        file: FloorFile,
        *,
        host_series: HostSeries,
        clocks: Clocks,
        internal_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._history = history
        self._file = file
        self._host_series = host_series
        self._monotonic = clocks.monotonic
        self._wall = clocks.wall
        self._internal_error = internal_error
        self._idle_floors: dict[Place, _Floors] = {
            "device": _Floors(),
            "host": _Floors(),
            "asleep": _Floors(warm_up=1, taken="in each sleep"),
        }
        self._windows = _Floors(ground="equal_work", taken=f"each {WINDOW_SECONDS:.0f} s")
        self._books = {place: floors.book for place, floors in self._idle_floors.items()}
        self._idle = IdlePeriod()
        self._window = _Window(self._monotonic())
        self._judged: dict[str, tuple[str, dict[GrowthGround, Judgement]]] = {}  # by the series' name, with its life
        self._last: dict[str, Measured] = {}
        # Series with a new floor, by name and ground, in the order in which they are judged.
        self._open: dict[tuple[str, GrowthGround], None] = {}
        self._reported: dict[str, tuple[str, SeriesGrowth]] = {}  # with their lives
        self._shown: tuple[SeriesGrowth, ...] = ()
        self._is_over = False
        self._report: Report | None = None
        self._report_ready = asyncio.Event()
        self._problem: str | None = None
        file.load(self._books, self._monotonic())
        slept = self._books["asleep"].rows[-1:]
        self._asleep = IdlePeriod(work=slept[0].work) if slept else IdlePeriod()
        for book in self._books.values():
            self._open |= dict.fromkeys((key.name, "idle_floors") for key in book.columns)
        self._log_problem()

    def notice(self, report: Report) -> None:
        """Take a report, which ``run`` examines: this never blocks the poller."""
        self._report = report
        self._idle = follow(self._idle, report, self._monotonic())
        self._asleep = follow_sleep(self._asleep, report, self._monotonic())
        self._report_ready.set()

    async def run(self) -> None:
        while True:
            await self._report_ready.wait()
            self._report_ready.clear()
            with contained(self._internal_error, log, "growth could not be judged"):
                if self._report is not None:
                    await self.look(self._report)

    async def look(self, report: Report) -> None:
        """Take the floors that are due, and judge some of the series that have new ones."""
        was_over, self._is_over = self._is_over, report.engine.traits.is_absent
        ranks = () if report.stale else report.ranks
        settled = [rank for rank in ranks if rank.age_seconds < self._idle.seconds(self._monotonic()) - 1.0]
        await self._take(
            "device", [rank for rank in settled if not rank.device.traits.is_host_memory], DEVICE_IDLE_SECONDS
        )
        await self._take("host", [rank for rank in settled if rank.device.traits.is_host_memory], HOST_IDLE_SECONDS)
        await self._take_asleep(ranks)
        await self._take_window(report)
        judged = [name for name, _ in zip(tuple(self._open), range(JUDGED_AT_ONCE), strict=False)]
        if judged:
            ahead = self._wall() - self._monotonic()
            happenings = [
                Happening(
                    event.at - ahead,
                    event.summary,
                    is_reset=event.kind == "reset" and event.result is not None and event.result.outcome == "done",
                )
                for event in reversed(self._history.events())
                if event.kind in _EVENTS
            ]
            for name, ground in judged:
                del self._open[name, ground]
                floors, key = self._floors_of(name, ground)
                life, before = self._judged.get(name, (key.life, {}))
                before = before if life == key.life else {}
                measured = self._last.get(name)
                judgement = judge(
                    floors.book.floors(name),
                    unit=key.unit,
                    ground=ground,
                    bounds=() if measured is None else measured.bounds,
                    happenings=happenings,
                    before=before.get(ground),
                    warm_up=floors.warm_up,
                    taken=floors.taken,
                )
                self._judged[name] = key.life, before | {ground: judgement}
        if was_over != self._is_over:
            self._show(self._judged)
        elif judged:
            self._show(name for name, _ in judged)

    async def _take(self, place: Place, ranks: Sequence[RankReading], idle_seconds: float) -> None:
        book, now = self._books[place], self._monotonic()
        last = book.rows[-1].at if book.rows else None
        if not is_due(self._idle, last, now, idle_seconds=idle_seconds):
            return
        idle = self._idle
        measured = [one for rank in ranks for one in device_series(rank)]
        if place == "host":
            measured += await self._host_series(idle.seconds(now))
            if self._idle.since != idle.since:
                return  # requests arrived meanwhile
        await self._keep(place, now, idle.work, measured)

    async def _take_asleep(self, ranks: Sequence[RankReading]) -> None:
        """Take one floor in each sleep, once it has settled and the ranks were read in it."""
        rows, now, asleep = self._books["asleep"].rows, self._monotonic(), self._asleep
        if asleep.since is None or asleep.seconds(now) < DEVICE_IDLE_SECONDS or (rows and rows[-1].at >= asleep.since):
            return
        seen = [rank for rank in ranks if rank.asleep_tags or rank.age_seconds < asleep.seconds(now) - 1.0]
        if len(seen) == len(ranks):
            await self._keep("asleep", now, asleep.work, [one for rank in seen for one in asleep_series(rank)])

    async def _take_window(self, report: Report) -> None:
        """Add a report to the present window, and keep that once it is over."""
        engine, now, window = report.engine, self._monotonic(), self._window
        if report.stale or engine.requests_running is None or not engine.traits.serves or engine.traits.is_late:
            self._window = _Window(now)
            return
        window.in_flight.append(engine.requests_running + (engine.requests_waiting or 0))
        window.add(one for rank in report.ranks for one in device_series(rank))
        if window.host_read_at is None or now - window.host_read_at >= HOST_SAMPLE_SECONDS:
            window.host_read_at = now
            window.add(await self._host_series(WINDOW_SECONDS))
        if now - window.since < WINDOW_SECONDS:
            return
        self._window = _Window(now)
        # They are not written to the file, as they come by the minute: a restart makes do without them.
        self._add(self._windows, now, engine.work, [*window.lowest.values()], fmean(window.in_flight))

    async def _keep(self, place: Place, now: float, work: WorkCounts, measured: Sequence[Measured]) -> None:
        if self._add(self._idle_floors[place], now, work, measured):
            await asyncio.to_thread(self._file.keep, place, self._books)
            self._log_problem()

    def _add(
        self, floors: _Floors, now: float, work: WorkCounts, measured: Sequence[Measured], in_flight: float = math.nan
    ) -> bool:
        """Take a floor of each series, which is judged later; return whether it was taken."""
        book, values = floors.book, {one.key: one.value for one in measured}
        if not measured or not book.add(now, self._wall(), work, values, in_flight):
            return False
        # A full book takes no further series: those are neither kept nor judged.
        measured = [one for one in measured if book.key(one.key.name) is not None]
        self._last |= {one.key.name: one for one in measured}
        before, floors.present = floors.present, frozenset(one.key.name for one in measured)
        self._open |= dict.fromkeys((name, floors.ground) for name in floors.present)
        self._show(before - floors.present)
        return True

    def _show(self, names: Iterable[str]) -> None:
        """Make the reported verdicts of these series, and sort all of them, the leaks first."""
        now, every = self._wall(), (*self._idle_floors.values(), self._windows)
        present = frozenset[str]().union(*(floors.present for floors in every))
        for name in names:
            if name not in self._judged:
                continue
            judged = self._judged[name][1]
            idle, work = judged.get("idle_floors"), judged.get("equal_work")
            if idle is None or work is None:
                judgement = next(iter(judged.values()))
            # By idle floors if there are any of late, unless windows of work show a leak.
            elif self._monotonic() - self._floors_of(name, "idle_floors")[0].book.rows[-1].at < _RECENT_SECONDS:
                judgement = work if (idle.kind, work.kind) == ("not_known", "leak") else idle
            else:
                judgement = idle if (idle.kind, work.kind) == ("leak", "not_known") else work
            _, key = self._floors_of(name, judgement.ground)
            shown = series_growth(
                key,
                judgement,
                measured=self._last.get(name),
                now=now,
                is_over=self._is_over or (bool(present) and name not in present),
            )
            life, verdict = self._reported.get(name, ("", shown))
            self._reported[name] = key.life, shown
            if (life == key.life and verdict.verdict == "leak") != (shown.verdict == "leak"):
                text = "leaks" if shown.verdict == "leak" else "no longer leaks"
                self._history.record("growth", f"{name} {text}")
                log.warning("%s %s", name, text)
        rows = [shown for _, shown in self._reported.values()]
        self._shown = tuple(sorted(rows, key=lambda one: (one.is_over, _ORDER[one.verdict], one.series)))

    def _floors_of(self, name: str, ground: GrowthGround) -> tuple[_Floors, SeriesKey]:
        return next((floors, key) for floors in self._grounds(ground) if (key := floors.book.key(name)) is not None)

    def _grounds(self, ground: GrowthGround) -> tuple[_Floors, ...]:
        return (self._windows,) if ground == "equal_work" else tuple(self._idle_floors.values())

    def _log_problem(self) -> None:
        problem = self._file.problem
        if problem is not None and problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem

    def verdicts(self) -> tuple[SeriesGrowth, ...]:
        return self._shown

    def find(self, name: str) -> SeriesGrowth:
        """Return one verdict, by its series' name, which programs use, or by its title, which people see.

        Raises:
            UnknownName: No such series has a verdict yet; the message lists those that have.
        """
        for one in self._shown:
            if name in (one.series, series_title(one)):
                return one
        raise UnknownName("series", name, [repr(one.series) for one in self._shown])

    def data(self, name: str, ground: GrowthGround = "idle_floors") -> list[Floor]:
        return [floor for floors in self._grounds(ground) for floor in floors.book.floors(name)]
