"""The past: readings, events, also as a live stream, and incidents, for programs, browsers and terminals."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import Field, TypeAdapter
from starlette.types import Receive, Scope, Send

from highwater.diagnose.evidence import Incident
from highwater.diagnose.incidents.store import UnreadableIncident, listing, to_bytes
from highwater.diagnose.verdict import JudgedReport
from highwater.http.access import peer_of
from highwater.http.services import (
    NO_STORE,
    OR_TEXT,
    FormatQuery,
    Parts,
    Services,
    StrictModel,
    ending,
    in_form,
    wants_text,
)
from highwater.http.text import markdown
from highwater.http.text.incidents import headlines_text, incident_markdown
from highwater.model.report import SCHEMA, Event
from highwater.process.errors import OK, NotAvailable, UnknownName
from highwater.watch.history import EVENTS_KEPT, Update

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
    limit: int = Field(100, ge=1, le=EVENTS_KEPT)


@router.get("/memory/history")
async def readings(parts: Parts, query: Annotated[HistoryQuery, Query()]) -> Response:
    """Readings from the ring, oldest first, and the events of that span."""
    history = parts.history
    since, marks = 0.0, history.marks
    if query.since is not None:
        try:
            since = marks[query.since].at if query.since in marks else float(query.since)
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise UnknownName("since", query.since, ["Unix seconds", *map(repr, marks)])
    step = max(query.step, MIN_STEP_SECONDS) if query.step else 0.0
    body = {
        "schema": SCHEMA,
        "now": history.now(),
        "events": _EVENTS.dump_python(history.events(since=since), mode="json"),
        "marks": [{"name": mark.name, "at": mark.at} for mark in marks.values()],
    }
    if query.recorded:
        if parts.recorders is None:
            raise NotAvailable("the workers have no recorders: recorder_dir is not set")
        body["recorded"] = await parts.recorders.samples(since)

    def written() -> bytes:
        # Piece by piece: one call that writes megabytes would hold the interpreter, and with it every other thread.
        taken, rows = history.readings(since, step)
        listed = ",".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
        return f'{json.dumps(body | {"step": taken}, allow_nan=False)[:-1]}, "readings": [{listed}]}}'.encode()

    # Open to all, and an hour of many ranks is megabytes: not on the loop that proxies, and one at a time.
    async with parts.history_turn:
        return Response(await asyncio.to_thread(written), media_type="application/json")


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


class _Live(StreamingResponse):
    """The live events for one watcher, which is counted from before its first byte is sent."""

    def __init__(self, services: Services, peer: str | None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self._services = services
        self._peer = peer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.history.watch(self._peer) as queue:
            self.body_iterator = self._messages(queue)
            await super().__call__(scope, receive, send)

    async def _messages(self, queue: asyncio.Queue[Update]) -> AsyncIterator[bytes]:
        """Yield the report now, and then every report and event, until the sidecar stops or the reader is too slow."""
        update: Update = self._services.report()
        while update is not None:
            if isinstance(update, Event):
                yield format_sse_event(event="event", data_str=_EVENT.dump_json(update).decode(), id=str(update.id))
            else:  # with its age, the policy's state and the verdicts as of now
                report = JudgedReport.of(self._services.report())
                yield format_sse_event(event="report", data_str=_REPORT.dump_json(report).decode())
            while True:
                try:
                    update = await asyncio.wait_for(queue.get(), PING_SECONDS)
                    break
                except TimeoutError:
                    yield KEEPALIVE_COMMENT


# --- incidents ---

# A response may hold lines of a log: no cache keeps it, nothing guesses at its type, no other site learns its address.
_HEADERS: Final = NO_STORE | ending(OK) | {"Referrer-Policy": "no-referrer"}
_PAGE_POLICY: Final = f"{markdown.CONTENT_SECURITY_POLICY}; frame-ancestors 'none'; sandbox"
_PAGE_HEADERS: Final = _HEADERS | {"Content-Security-Policy": _PAGE_POLICY}


class IncidentQuery(StrictModel):
    format: Literal["json", "text", "html"] | None = None


@router.get("/memory/incidents", responses=OR_TEXT)
async def listed(request: Request, parts: Parts, query: Annotated[FormatQuery, Query()]) -> Response:
    """Return the incidents, newest first: the engine died, hung, had no memory left, or did not start."""
    incidents = parts.incidents
    headlines = await incidents.headlines()
    answer = listing(headlines, incidents.folder, incidents.problem) | {"has_engine_log": incidents.has_log}
    text = partial(headlines_text, headlines, problem=incidents.problem)
    return in_form(request, text, lambda: answer, headers=_HEADERS, chosen=query.format)


@router.get("/memory/incidents/{incident_id}", responses={200: {"content": {"text/plain": {}, "text/html": {}}}})
async def one(
    request: Request,
    parts: Parts,
    incident_id: Annotated[str, Path(description="as in the list")],
    query: Annotated[IncidentQuery, Query()],
) -> Response:
    """Return one incident: what was known, what it means, what to change; as a page for a browser."""
    try:
        incident = await parts.incidents.read(incident_id)
    except UnreadableIncident as exc:
        raise HTTPException(409, f"the incident is there and cannot be read: {exc}") from exc
    if incident is None:
        lists = "`highwater incidents` and GET /memory/incidents list them"
        raise HTTPException(404, f"id: there is no incident {incident_id[:64]!r}; {lists}")
    form = query.format
    if form is None and "text/html" in request.headers.get("accept", ""):
        form = "html"
    if form is None:
        form = "text" if wants_text(request) else "json"

    def rendered(incident: Incident) -> Response:
        if form == "html":
            # Relative: it also leads back beneath a reverse proxy's prefix.
            back = '<p><a href="../../dashboard">Back to the dashboard</a></p>\n'
            page = markdown.page(incident_markdown(incident, charts=True), title=incident.id, above=back)
            return HTMLResponse(page, headers=_PAGE_HEADERS)
        if form == "text":
            return PlainTextResponse(incident_markdown(incident), headers=_HEADERS)
        return Response(to_bytes(incident), media_type="application/json", headers=_HEADERS)

    # In a thread: it may be megabytes, and the data plane shares this loop.
    return await asyncio.to_thread(rendered, incident)
