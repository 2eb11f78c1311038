"""``GET /memory``: the report, also as text or as what changed since a mark; and the marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from highwater.accounting.attribution import compare
from highwater.api.services import Services
from highwater.errors import UnknownName
from highwater.memory.history import MARKS_KEPT, Mark
from highwater.readings import Caller, RankDelta, Report
from highwater.text.report import report_text

_REPORT = TypeAdapter(Report)
_DELTAS = TypeAdapter(tuple[RankDelta, ...])
_FORBID = ConfigDict(extra="forbid")


class MemoryQuery(BaseModel):
    """The query of ``GET /memory``."""

    model_config = _FORBID

    format: Literal["json", "text"] | None = None
    since: str | None = Field(None, max_length=128, description="a mark: adds what changed since")


class MarkRequest(BaseModel):
    """The body of ``POST /memory/marks``."""

    model_config = _FORBID

    name: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$", examples=["after bench"])


def memory_router(services: Services) -> APIRouter:
    """``/memory`` and ``/memory/marks``."""
    router = APIRouter(tags=["memory"])
    history = services.history
    control = Depends(services.control)

    @router.get("/memory", response_model=Report, responses={200: {"content": {"text/plain": {}}}})
    async def memory(request: Request, query: Annotated[MemoryQuery, Query()]) -> Response:
        """Return the memory as of the last poll; as a table with ``Accept: text/plain`` or ``?format=text``."""
        report = services.report()
        if wants_text(request, query.format):
            return PlainTextResponse(report_text(report))
        if query.since is None:
            return Response(_REPORT.dump_json(report), media_type="application/json")
        mark = _mark(history.marks, query.since)
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
        made = history.mark(body.name, () if report.stale else report.ranks, caller=caller)
        known = {"name": made.name, "at": made.at, "ranks": [asdict(rank)["rank"] for rank in made.ranks]}
        return JSONResponse({"schema": 1, **known, "kept": MARKS_KEPT}, 201)

    return router


def wants_text(request: Request, chosen: str | None) -> bool:
    """Return whether to answer as text: as the query says, else as the ``Accept`` header does."""
    if chosen is not None:
        return chosen == "text"
    accept = request.headers.get("accept", "")
    return "text/plain" in accept and "application/json" not in accept


def _mark(marks: Mapping[str, Mark], name: str) -> Mark:
    if name not in marks:
        raise UnknownName("since", name, [repr(known) for known in marks])
    return marks[name]
