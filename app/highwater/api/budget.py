"""The route of the memory budget, explained rank by rank. It calls no worker, so any caller may read it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import TypeAdapter

from highwater.api.budget_text import budget_text
from highwater.api.requests import OR_TEXT, FormatQuery, wants_text
from highwater.api.services import Services
from highwater.diagnose.budget import Explained, explained
from highwater.plan.explanation import explain
from highwater.plan.live_engine import LiveEngine, LiveWorker, live_engine
from highwater.readings.rank import RankReading
from highwater.readings.report import Report

WHY_MISSING = (
    "nothing reports its start; set HIGHWATER_RECORDER_DIR for vLLM and recorder_dir for the sidecar, or load the "
    "worker extension in development mode"
)
_EXPLAINED = TypeAdapter(Explained)


class StartReports:
    def __init__(self, services: Services) -> None:
        self._services = services

    def live_engine(self, report: Report) -> LiveEngine:
        """Return the first data-parallel engine; raises PlanError with rank and figure where one is not reported."""
        first = report.ranks[0].dp_rank if report.ranks else None
        return live_engine(
            [
                LiveWorker(reading, budget)
                for reading in report.ranks
                if reading.dp_rank == first and (budget := self._services.budgets.budget_of(reading)) is not None
            ]
        )

    def explained(self, report: Report) -> Explained:
        engine = report.engine
        readings = [self._with_start(reading) for reading in report.ranks]
        explanation = explain(
            readings,
            self._services.budgets.budget_of,
            model=engine.model,
            vllm_version=engine.version,
            why_missing=WHY_MISSING,
        )
        if not readings:
            why = engine.hint or "its workers report nothing of their memory yet"
            explanation = replace(explanation, problems=(f"no rank is reported: {why}",))
        return explained(explanation, taken_at=report.taken_at, engine_state=engine.state)

    def _with_start(self, reading: RankReading) -> RankReading:
        if reading.start:
            return reading
        reported = self._services.budgets.of(reading.host, reading.pid, reading.pid_started)
        return reading if reported is None else replace(reading, start=reported.start)


def budget_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["memory"])
    starts = StartReports(services)
    last: tuple[Report, Explained] | None = None
    turn = asyncio.Lock()

    @router.get("/memory/budget", response_model=Explained, responses=OR_TEXT)
    async def budget(request: Request, query: Annotated[FormatQuery, Query()]) -> Response:
        """Return the memory explained: the start's budget, the KV pool, the encoder, and what was not counted.

        As a picture and tables with ``Accept: text/plain`` or ``?format=text``. No worker is called.
        """
        nonlocal last
        report = services.poller.current()
        # Any caller may send it, and it changes with a report only: explained once for each, off the loop that proxies.
        async with turn:
            if last is None or last[0] is not report:
                last = report, await asyncio.to_thread(starts.explained, report)
            answer = last[1]
        if wants_text(request, query.format):
            return PlainTextResponse(budget_text(answer))
        return Response(_EXPLAINED.dump_json(answer), media_type="application/json")

    return router
