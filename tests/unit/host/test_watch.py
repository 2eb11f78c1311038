"""The last reading is kept and shared by all requests within a second; a fault costs only itself."""

from __future__ import annotations

import asyncio
import logging

import pytest

from highwater.host.watch import HostWatch
from highwater.process.clocks import Clocks
from tests.unit.host.recorded import reading


class Reader:
    """Counts its reads, and fails on demand."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails = False

    def read(self):
        self.reads += 1
        if self.fails:
            raise OSError("gone")
        return reading()


async def test_requests_within_a_second_share_a_reading():
    """Clients may request a report at any rate."""
    now, reader = [100.0], Reader()
    watch = HostWatch(reader, clocks=Clocks(lambda: now[0]))
    await asyncio.gather(*(watch.report() for _ in range(9)))
    assert reader.reads == 1
    now[0] += 1.5
    report = await watch.report()
    assert (reader.reads, report.age_seconds, watch.now.report.summary.processes) == (2, 0.0, 3)
    assert watch.now.report.summary.largest == "worker rank 0"


async def test_the_pace_is_that_since_the_engine_was_ready():
    now, life = [100.0], [None]
    watch = HostWatch(Reader(), life=lambda: life[0], clocks=Clocks(lambda: now[0]))
    windows = []
    for life[0] in (None, None, "a", "a"):
        now[0] += 70.0
        windows.append((await watch.read()).report.outlook.window_seconds)
    assert windows == [0.0, 70.0, 0.0, 70.0]


async def test_a_fault_is_counted_and_the_next_reading_is_tried(caplog):
    reader, errors, rounds = Reader(), [], []
    reader.fails = True

    async def sleep(_):
        rounds.append(1)
        reader.fails = False
        if len(rounds) == 2:
            raise asyncio.CancelledError

    watch = HostWatch(reader, internal_error=lambda: errors.append(1), sleep=sleep, clocks=Clocks(lambda: 1.0))
    assert watch.now is None
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await watch.run()
    assert (len(errors), watch.now is not None) == (1, True)
    assert "host memory could not be read" in caplog.text


async def test_a_listener_that_fails_costs_the_others_nothing(caplog):
    errors, heard = [], []
    watch = HostWatch(Reader(), internal_error=lambda: errors.append(1), clocks=Clocks(lambda: 1.0))
    watch.listeners += [lambda _: 1 / 0, heard.append]
    facts = await watch.facts()
    assert (heard, errors) == ([facts.reading], [1])
    assert "ZeroDivisionError" in caplog.text
