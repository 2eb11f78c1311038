"""What a sidecar remembers of an hour: readings of the fake engine at times of our choice, and the story on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from highwater.model.engine import EngineStatus, WorkCounts
from highwater.model.remedies import RemedyResult, credit, freed, total
from highwater.model.report import Report
from highwater.watch.history import History
from tests.fakes.engine import CACHED, IMAGE_BYTES, MIB, FakeEngine

HOUR = 3600


class SetClock:
    """The real time, or the one that was set."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self) -> float:
        return time.time() if self.at is None else self.at


def an_hour(
    history: History,
    fake: FakeEngine,
    clock: SetClock,
    move: Callable[[float], object],
    seconds: int = HOUR,
    *,
    every: int = 1,
) -> None:
    """A reading for each second until now, or each so many; before each, `move(seconds ago)` changes the engine."""
    history._samples.clear()  # the poll that found the engine is of now, and would stand before the hour
    history.began_at = time.time() - seconds
    begin = history.began_at
    for place, event in enumerate(history._events):  # it was found before the hour, too
        history._events[place] = replace(event, at=begin)
    with dated(history, clock):
        for second in range(0, seconds, every):
            clock.at = begin + second
            move(seconds - second)
            history.add(report_of(fake, clock.at))


@contextmanager
def dated(history: History, clock: SetClock) -> Iterator[None]:
    """Events, marks and readings are dated by this clock too."""

    def monotonic() -> float:
        return time.monotonic() - (time.time() - clock())

    with mock.patch.multiple(history, _wall=clock, _monotonic=monotonic):
        yield
    clock.at = None


def report_of(fake: FakeEngine, at: float) -> Report:
    engine = EngineStatus(
        url="http://127.0.0.1:8000",
        state="ready",
        requests_running=fake.running,
        requests_waiting=fake.waiting,
        kv_cache_usage_ratio=fake.kv_usage,
        work=WorkCounts(requests=fake.requests_ended),
    )
    ranks = fake.readings()
    return Report(taken_at=at, age_seconds=0.0, stale=False, engine=engine, ranks=ranks, ranks_reported=len(ranks))


class Story:
    """The benchmark, the reset that frees nothing, the reclaim that does, and traffic again; as `an_hour`'s `move`."""

    def __init__(self, history: History, fake: FakeEngine) -> None:
        self._history, self._fake = history, fake
        self._images = 0
        self._plan: dict[int, Callable[[], object]] = {
            3300: lambda: self._mark("before bench"),
            2010: lambda: self._mark("after bench"),
            1800: lambda: self._run("reset_mm_cache", lambda: None),
            1380: lambda: self._run("reset_encoder_cache", self._forget),
        }

    def __call__(self, ago: float) -> None:
        fake = self._fake
        if ago in self._plan:
            self._plan[int(ago)]()
        wanted = self._wanted(ago)
        if wanted > self._images:
            fake.serve_images(wanted - self._images)
            self._images = wanted
        busy = 2040 < ago < 3240 or ago < 960
        fake.running = round(9 + 5 * math.sin(ago / 37) + 2 * math.sin(ago / 11)) if busy else 0
        fake.waiting = max(round(6 * math.sin(ago / 90) - 1), 0) if busy else 0
        fake.kv_usage = 0.05 + 0.03 * fake.running if busy else 0.0
        fake.requests_ended += fake.running // 4
        for worker in fake.workers:
            worker.rss = round((6.0 + 0.4 * math.sin(ago / 600) + 0.1 * worker.rank) * 1024 * MIB)

    @staticmethod
    def _wanted(ago: float) -> int:
        if ago > 1380:
            return round(31 * min(max((3240 - ago) / 1200, 0), 1))
        return round(14 * min(max((960 - ago) / 900, 0), 1))

    def _mark(self, name: str) -> None:
        self._history.mark(name, self._fake.readings())

    def _forget(self) -> None:
        self._images = 0
        for worker in self._fake.workers:
            worker.forget_entries()
            worker.release()
            worker.cached = CACHED

    def _run(self, remedy: str, act: Callable[[], object]) -> None:
        before = self._fake.readings()
        act()
        after = self._fake.readings()
        deltas = freed(before, after)
        freed_bytes, components = total(deltas)
        result = RemedyResult(
            remedy=remedy,
            outcome="done",
            seconds=0.42,
            freed_bytes=freed_bytes,
            freed_components=components,
            ranks=deltas,
            credited_bytes=credit(remedy, before, after).freed_bytes,
            quiesced_by="nothing",
        )
        summary = f"{remedy} done, freed {(freed_bytes or 0) / MIB:,.1f} MiB in 0.42 s"
        self._history.record("reset", summary, trigger="drop-in", result=result)


def many_ranks(fake: FakeEngine) -> Callable[[float], object]:
    """Eight ranks under load, as `an_hour`'s `move`: a growth of its own on each, and peaks."""

    def move(ago: float) -> None:
        second = HOUR - ago
        fake.requests_ended += 5
        fake.running, fake.waiting = round(20 + 8 * math.sin(second / 61)), round(3 + 3 * math.sin(second / 23))
        fake.kv_usage = 0.5 + 0.3 * math.sin(second / 200)
        for worker in fake.workers:
            worker.other_tensors = round((200 + 90 * math.sin(second / 5 + worker.rank)) * MIB)
            images = int(second / 150) + worker.rank % 2
            worker.entries = {f"{number:064x}": IMAGE_BYTES for number in range(images)}
            worker.cached = CACHED - worker.rank * 20 * MIB

    return move
