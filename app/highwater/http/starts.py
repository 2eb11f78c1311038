"""The running engine's start, as its workers reported it: for the budget, and for plans that begin from it.

Any caller may ask for either, or for the findings, and each takes a while: one at a time, off the loop that proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from highwater.diagnose.rules.book import Explained, explained
from highwater.explain.explanation import explain
from highwater.explain.live_engine import LiveEngine, LiveWorker, live_engine
from highwater.model.rank import RankReading
from highwater.model.report import Report
from highwater.process.errors import TooManyWaiting
from highwater.watch.sources import EngineBudgets

WHY_MISSING: Final = (
    "nothing reports its start; set HIGHWATER_RECORDER_DIR for vLLM and recorder_dir for the sidecar, or load the "
    "worker extension in development mode"
)


class StartReports:
    def __init__(self, budgets: EngineBudgets) -> None:
        self._budgets = budgets
        self._last: tuple[Report, Explained] | None = None
        self._turn = asyncio.Lock()

    def live_engine(self, report: Report) -> LiveEngine:
        """Return the first data-parallel engine; raises PlanError with rank and figure where one is not reported."""
        first = report.ranks[0].dp_rank if report.ranks else None
        return live_engine(
            [
                LiveWorker(reading, budget)
                for reading in report.ranks
                if reading.dp_rank == first and (budget := self._budgets.budget_of(reading)) is not None
            ]
        )

    async def explained(self, report: Report) -> Explained:
        """Return the memory explained, once for each round: its readings and the engine's state are all it needs."""
        async with self._turn:
            last = self._last
            if last is None or last[0].ranks is not report.ranks or last[0].engine is not report.engine:
                last = self._last = report, await asyncio.to_thread(self._explained, report)
            return last[1]

    def _explained(self, report: Report) -> Explained:
        engine, budgets = report.engine, self._budgets

        def with_start(reading: RankReading) -> RankReading:
            reported = None if reading.start else budgets.of(reading.process)
            return reading if reported is None else replace(reading, start=reported.start)

        readings = [with_start(reading) for reading in report.ranks]
        explanation = explain(
            readings,
            budgets.budget_of,
            model=engine.model,
            vllm_version=engine.version,
            why_missing=WHY_MISSING,
        )
        if not readings:
            why = engine.hint or "its workers report nothing of their memory yet"
            explanation = replace(explanation, problems=(f"no rank is reported: {why}",))
        return explained(replace(report, ranks=tuple(readings)), explanation)


class Turns:
    """Lets one plan be computed at a time, and up to `most_waiting` wait."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._present = 0
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def next(self) -> AsyncIterator[None]:
        """Wait for the turn, which lasts until the context ends; raises TooManyWaiting where no more may wait."""
        waiting = self._present - 1
        if waiting >= self._most_waiting:
            raise TooManyWaiting(
                f"a plan is computed and {waiting} wait for theirs; at most {self._most_waiting} may wait"
            )
        self._present += 1
        try:
            async with self._turn:
                yield
        finally:
            self._present -= 1


class Fresh:
    """A response that is made once in so many seconds, whoever asks for it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: tuple[float, bytes] | None = None
        self._turn = asyncio.Lock()

    async def of(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        async with self._turn:
            now = asyncio.get_running_loop().time()
            if self._last is None or now - self._last[0] >= self._seconds:
                self._last = now, await make()
            return self._last[1]
