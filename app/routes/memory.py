"""Where the memory is and was: the report, the encoder cache's entries, history, events, marks."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from app.attribution import compare
from app.errors import EngineError, NotAvailable, UnknownName
from app.history import MARKS_KEPT, WATCHERS_MOST, Mark
from app.readings import Event, RankDelta, Report
from app.routes.services import Services
from app.table import report_text

PING_SECONDS = 15.0
_REPORT = TypeAdapter(Report)
_EVENT = TypeAdapter(Event)
_EVENTS = TypeAdapter(list[Event])
_DELTAS = TypeAdapter(tuple[RankDelta, ...])
_FORBID = ConfigDict(extra="forbid")


class MemoryQuery(BaseModel):
    """The query of ``GET /memory``."""

    model_config = _FORBID

    format: Literal["json", "text"] | None = None
    since: str | None = Field(None, max_length=128, description="a mark: adds what changed since")


class EntriesQuery(BaseModel):
    """The query of ``GET /memory/encoder-cache``."""

    model_config = _FORBID

    rank: int | None = None
    limit: int = Field(100, ge=0, le=10_000)
    sort: Literal["bytes", "age"] = "bytes"


class HistoryQuery(BaseModel):
    """The query of ``GET /memory/history``."""

    model_config = _FORBID

    since: str | None = Field(None, max_length=128, description="Unix seconds, or a mark; default: all that is kept")
    step: float = Field(0.0, ge=0, le=86_400, allow_inf_nan=False, description="one reading in so many seconds")
    recorded: bool = Field(False, description="adds what the workers' flight recorders hold, at their own rate")


class EventsQuery(BaseModel):
    """The query of ``GET /memory/events``."""

    model_config = _FORBID

    limit: int = Field(100, ge=1, le=1000)


class MarkRequest(BaseModel):
    """The body of ``POST /memory/marks``."""

    model_config = _FORBID

    name: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$", examples=["after bench"])


def memory_router(services: Services) -> APIRouter:  # noqa: C901 - one small handler for each path
    """``/memory`` and everything beneath it that only reads, and the marks."""
    router = APIRouter(tags=["memory"])
    history = services.history
    history_turn = asyncio.Lock()

    @router.get("/memory", response_model=Report, responses={200: {"content": {"text/plain": {}}}})
    async def memory(request: Request, query: Annotated[MemoryQuery, Query()]) -> Response:
        """Where the memory is, as of the last poll; as a table with ``Accept: text/plain`` or ``?format=text``."""
        report = services.report()
        if _wants_text(request, query.format):
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

    @router.get("/memory/encoder-cache")
    async def encoder_cache(query: Annotated[EntriesQuery, Query()]) -> JSONResponse:
        """What the encoder cache of each rank holds; the workers are asked once a second at most."""
        if not services.poller.capabilities.collective_rpc:
            raise NotAvailable(services.poller.current().engine.hint or "the worker extension is not loaded")
        try:
            answers = await services.entries.read()
        except EngineError as exc:
            raise NotAvailable(str(exc)) from exc
        known = [answer.get("rank") for answer in answers]
        if query.rank is not None and query.rank not in known:
            raise UnknownName("rank", query.rank, [str(rank) for rank in known])
        chosen = [answer for answer in answers if query.rank is None or answer.get("rank") == query.rank]
        return JSONResponse({"schema": 1, "ranks": [_cut(answer, query) for answer in chosen]})

    @router.get("/memory/history")
    async def readings(query: Annotated[HistoryQuery, Query()]) -> Response:
        """Readings from the ring, oldest first, and the events of that span."""
        since = _moment(history.marks, query.since)
        body = {
            "schema": 1,
            "now": time.time(),
            "events": _EVENTS.dump_python(history.events(since=since), mode="json"),
            "marks": [{"name": mark.name, "at": mark.at} for mark in history.marks.values()],
        }
        if query.recorded:
            if services.flight is None:
                raise NotAvailable("the workers have no flight recorders: recorder_dir is not set")
            body["recorded"] = await services.flight.samples(since)
        # Anybody may ask, and an hour of many ranks is megabytes: not on the loop that proxies, and one at a time.
        async with history_turn:
            content = await asyncio.to_thread(lambda: _history_json(body, *history.readings(since, query.step)))
        return Response(content, media_type="application/json")

    @router.get("/memory/events", responses={200: {"content": {"text/event-stream": {}}}})
    async def events(request: Request, query: Annotated[EventsQuery, Query()]) -> Response:
        """What happened, newest first; with ``Accept: text/event-stream`` reports and events as they come."""
        if "text/event-stream" in request.headers.get("accept", ""):
            if not services.history.can_watch():
                raise NotAvailable(f"{WATCHERS_MOST} readers follow the events already; close one, or poll")
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(_live(services), media_type="text/event-stream", headers=headers)
        listed = _EVENTS.dump_python(history.events(limit=query.limit), mode="json")
        return JSONResponse({"schema": 1, "events": listed})

    @router.post("/memory/marks", status_code=201, dependencies=[Depends(services.control)])
    async def mark(body: MarkRequest) -> JSONResponse:
        """Name this moment; ``/memory?since=NAME`` then tells what changed."""
        report = await services.poller.poll()
        made = history.mark(body.name, () if report.stale else report.ranks)
        known = {"name": made.name, "at": made.at, "ranks": [asdict(rank)["rank"] for rank in made.ranks]}
        return JSONResponse({"schema": 1, **known, "kept": MARKS_KEPT}, 201)

    return router


def _wants_text(request: Request, chosen: str | None) -> bool:
    if chosen is not None:
        return chosen == "text"
    accept = request.headers.get("accept", "")
    return "text/plain" in accept and "application/json" not in accept


def _mark(marks: Mapping[str, Mark], name: str) -> Mark:
    if name not in marks:
        raise UnknownName("since", name, [repr(known) for known in marks])
    return marks[name]


def _moment(marks: Mapping[str, Mark], since: str | None) -> float:
    if since is None:
        return 0.0
    if since in marks:
        return marks[since].at
    try:
        moment = float(since)
    except ValueError:
        moment = float("nan")
    if not math.isfinite(moment):
        raise UnknownName("since", since, ["Unix seconds", *(repr(known) for known in marks)])
    return moment


def _cut(answer: dict[str, Any], query: EntriesQuery) -> dict[str, Any]:
    entries = answer["entries"]
    if query.sort == "age":
        entries = sorted(entries, key=lambda entry: entry.get("age_seconds") or 0.0, reverse=True)
    dropped = ("ok", "op", "schema")
    return {key: value for key, value in answer.items() if key not in dropped} | {"entries": entries[: query.limit]}


def _history_json(body: dict[str, Any], step: float, readings: list[dict[str, Any]]) -> bytes:
    """Piece by piece: one call that writes megabytes would hold the interpreter, and with it every other thread."""
    written = ",".join(json.dumps(reading, allow_nan=False, separators=(",", ":")) for reading in readings)
    return f'{json.dumps(body | {"step": step}, allow_nan=False)[:-1]}, "readings": [{written}]}}'.encode()


async def _live(services: Services) -> AsyncIterator[bytes]:
    """The report now, and then every report and event; ends when the sidecar stops or the reader is too slow."""
    with services.history.watch() as queue:
        yield format_sse_event(event="report", data_str=_report_json(services.report()))
        while True:
            try:
                told = await asyncio.wait_for(queue.get(), PING_SECONDS)
            except TimeoutError:
                yield KEEPALIVE_COMMENT
                continue
            if told is None:
                return
            if isinstance(told.value, Event):
                data = _EVENT.dump_json(told.value).decode()
                yield format_sse_event(event="event", data_str=data, id=str(told.value.id))
            else:
                yield format_sse_event(event="report", data_str=_report_json(services.report()))


def _report_json(report: Report) -> str:
    return _REPORT.dump_json(report).decode()
