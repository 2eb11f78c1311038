"""``GET /memory``: the report, also as text or as what changed since a mark; and the marks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field, TypeAdapter

from highwater.accounting.totals import compare
from highwater.api.requests import OR_TEXT, FormatQuery, StrictModel, wants_text
from highwater.api.services import Services
from highwater.errors import UnknownName
from highwater.memory.history import MARKS_KEPT
from highwater.readings.event import Caller
from highwater.readings.remedy import RankDelta
from highwater.readings.report import Report
from highwater.readings.schema import SCHEMA
from highwater.text.report import report_text

_REPORT = TypeAdapter(Report)
_DELTAS = TypeAdapter(tuple[RankDelta, ...])


class MemoryQuery(FormatQuery):
    since: str | None = Field(None, max_length=128, description="a mark: adds what changed since")


class MarkRequest(StrictModel):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$", examples=["after bench"])


def memory_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["memory"])
    history = services.history
    control = Depends(services.control)

    @router.get("/memory", response_model=Report, responses=OR_TEXT)
    async def memory(request: Request, query: Annotated[MemoryQuery, Query()]) -> Response:
        """Return the memory as of the last poll; as a table with ``Accept: text/plain`` or ``?format=text``."""
        report = services.report()
        if wants_text(request, query.format):
            return PlainTextResponse(report_text(report))
        if query.since is None:
            return Response(_REPORT.dump_json(report), media_type="application/json")
        mark = history.marks.get(query.since)
        if mark is None:
            raise UnknownName("since", query.since, [repr(known) for known in history.marks])
        since = {
            "mark": mark.name,
            "at": mark.at,
            "ranks": _DELTAS.dump_python(compare(mark.ranks, report.ranks), mode="json"),
        }
        return JSONResponse(_REPORT.dump_python(report, mode="json") | {"since": since})

    @router.post("/memory/marks", status_code=201)
    async def mark(body: MarkRequest, caller: Caller = control) -> JSONResponse:
        """Name this moment; ``/memory?since=NAME`` then shows what changed."""
        report = await services.poller.poll()
        new = history.mark(body.name, () if report.stale else report.ranks, caller=caller)
        ranks = [rank.rank for rank in new.ranks]
        return JSONResponse({"schema": SCHEMA, "name": new.name, "at": new.at, "ranks": ranks, "kept": MARKS_KEPT}, 201)

    return router
