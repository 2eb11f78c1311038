"""``GET /memory/history`` and ``GET /memory/events``: past readings, and events also as a live stream."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import Field, TypeAdapter
from starlette.types import Receive, Scope, Send

from highwater.diagnose.verdict import JudgedReport
from highwater.http.access import peer_of
from highwater.http.services import Parts, Services, StrictModel
from highwater.model.report import SCHEMA, Event
from highwater.process.errors import NotAvailable, UnknownName
from highwater.watch.history import Mark, Update

PING_SECONDS = 15.0
MIN_STEP_SECONDS = 0.001
_REPORT = TypeAdapter(JudgedReport)
_EVENT = TypeAdapter(Event)
_EVENTS = TypeAdapter(list[Event])

router = APIRouter(tags=["memory"])


class HistoryQuery(StrictModel):
    since: str | None = Field(None, max_length=128, description="Unix seconds, or a mark; default: all")
    step: float = Field(0.0, ge=0, le=86_400, allow_inf_nan=False, description="one reading in so many seconds; 0: all")
    recorded: bool = Field(False, description="adds what the workers' recorders hold, at their own rate")


class EventsQuery(StrictModel):
    limit: int = Field(100, ge=1, le=1000)


@router.get("/memory/history")
async def readings(parts: Parts, query: Annotated[HistoryQuery, Query()]) -> Response:
    """Readings from the ring, oldest first, and the events of that span."""
    history = parts.history
    since = _moment(history.marks, query.since)
    step = max(query.step, MIN_STEP_SECONDS) if query.step else 0.0
    body = {
        "schema": SCHEMA,
        "now": history.now(),
        "events": _EVENTS.dump_python(history.events(since=since), mode="json"),
        "marks": [{"name": mark.name, "at": mark.at} for mark in history.marks.values()],
    }
    if query.recorded:
        if parts.recorders is None:
            raise NotAvailable("the workers have no recorders: recorder_dir is not set")
        body["recorded"] = await parts.recorders.samples(since)
    # Open to all, and an hour of many ranks is megabytes: not on the loop that proxies, and one at a time.
    async with parts.history_turn:
        content = await asyncio.to_thread(lambda: _history_json(body, *history.readings(since, step)))
    return Response(content, media_type="application/json")


@router.get("/memory/events", responses={200: {"content": {"text/event-stream": {}}}})
async def events(request: Request, parts: Parts, query: Annotated[EventsQuery, Query()]) -> Response:
    """Return what happened, newest first; with ``Accept: text/event-stream`` reports and events as they come."""
    if "text/event-stream" in request.headers.get("accept", ""):
        peer = None if parts.control.caller(request) is not None else peer_of(request)
        if not parts.history.can_watch(peer):
            raise NotAvailable(
                "too many readers follow the events, in all or from your address; close one, poll, or send the "
                "admin token, for which places are reserved"
            )
        return _Live(parts, peer)
    listed = _EVENTS.dump_python(parts.history.events(limit=query.limit), mode="json")
    return JSONResponse({"schema": SCHEMA, "events": listed})


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


def _history_json(body: dict[str, Any], step: float, readings: list[dict[str, Any]]) -> bytes:
    # Piece by piece: one call that writes megabytes would hold the interpreter, and with it every other thread.
    written = ",".join(json.dumps(reading, allow_nan=False, separators=(",", ":")) for reading in readings)
    return f'{json.dumps(body | {"step": step}, allow_nan=False)[:-1]}, "readings": [{written}]}}'.encode()


class _Live(StreamingResponse):
    """The live events for one watcher, which is counted from before its first byte is sent."""

    def __init__(self, services: Services, peer: str | None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self._services = services
        self._peer = peer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.history.watch(self._peer) as queue:
            self.body_iterator = _live(self._services, queue)
            await super().__call__(scope, receive, send)


async def _live(services: Services, queue: asyncio.Queue[Update]) -> AsyncIterator[bytes]:
    """Yield the report now, and then every report and event, until the sidecar stops or the reader is too slow."""
    yield _report_message(services)
    while True:
        try:
            update = await asyncio.wait_for(queue.get(), PING_SECONDS)
        except TimeoutError:
            yield KEEPALIVE_COMMENT
            continue
        if update is None:
            return
        if isinstance(update, Event):
            yield format_sse_event(event="event", data_str=_EVENT.dump_json(update).decode(), id=str(update.id))
        else:
            yield _report_message(services)


def _report_message(services: Services) -> bytes:
    return format_sse_event(event="report", data_str=_REPORT.dump_json(JudgedReport.of(services.report())).decode())
