"""Routes of the memory, now and before: the report, the encoder cache's entries, history, events, marks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from highwater.accounting.attribution import compare
from highwater.api.access import peer_of
from highwater.api.services import Services
from highwater.errors import EngineError, NotAvailable, UnknownName
from highwater.memory.history import MARKS_KEPT, Mark, Told
from highwater.memory.sources.encoder_cache import EntriesReading
from highwater.readings import Caller, Event, RankDelta, Report
from highwater.text.table import report_text

PING_SECONDS = 15.0
_REPORT = TypeAdapter(Report)
_EVENT = TypeAdapter(Event)
_EVENTS = TypeAdapter(list[Event])
_DELTAS = TypeAdapter(tuple[RankDelta, ...])
_FORBID = ConfigDict(extra="forbid")


MIN_STEP_SECONDS = 0.001
NOT_READ = (
    "nobody has read the entries of this engine yet, and without the admin token no worker is asked; send it, "
    "Authorization: Bearer TOKEN (`highwater token --port PORT` prints it)"
)
NOT_ASKED = "as last read; with the admin token the workers are asked, and mm_hash is whole"
SHORTENED = "with the admin token mm_hash is whole"


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
    step: float = Field(0.0, ge=0, le=86_400, allow_inf_nan=False, description="one reading in so many seconds; 0: all")
    recorded: bool = Field(False, description="adds what the workers' recorders hold, at their own rate")


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
    alias = Alias()
    control = Depends(services.control)

    @router.get("/memory", response_model=Report, responses={200: {"content": {"text/plain": {}}}})
    async def memory(request: Request, query: Annotated[MemoryQuery, Query()]) -> Response:
        """Return the memory as of the last poll; as a table with ``Accept: text/plain`` or ``?format=text``."""
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
    async def encoder_cache(request: Request, query: Annotated[EntriesQuery, Query()]) -> Response:
        """Return what the encoder cache of each rank holds.

        Where every worker has a recorder, its entries are returned. Elsewhere the workers are asked, with the admin
        token and once a second at most; without the token no worker is called, and the response has what was last read
        and its age. Without the token `mm_hash` is a short name that does not identify the image.
        """
        may_ask = services.control.caller(request) is not None
        reading, is_recorded = await _entries(services, may_ask=may_ask)
        pids = {rank.pid for rank in services.poller.current().ranks}
        # Those of workers that are gone say nothing about the workers that there are now.
        known = [] if reading is None else [rank for rank in reading.ranks if rank.head.get("pid") in pids]
        names = [rank.head.get("rank") for rank in known]
        if query.rank is not None and query.rank not in names and known:
            raise UnknownName("rank", query.rank, [str(rank) for rank in names])
        age = round(services.entries.age_seconds(reading), 3) if reading is not None and known else None
        note = None if may_ask else NOT_READ if age is None else SHORTENED if is_recorded else NOT_ASKED
        wanted = [rank for rank in known if query.rank in (None, rank.head.get("rank"))]
        ranks = [await rank.json(query.limit, query.sort, None if may_ask else alias) for rank in wanted]
        head = to_json({"schema": 1, "age_seconds": age, "note": note})
        return Response(head[:-1] + b',"ranks":[' + b",".join(ranks) + b"]}", media_type="application/json")

    @router.get("/memory/history")
    async def readings(query: Annotated[HistoryQuery, Query()]) -> Response:
        """Readings from the ring, oldest first, and the events of that span."""
        since = _moment(history.marks, query.since)
        step = max(query.step, MIN_STEP_SECONDS) if query.step else 0.0
        body = {
            "schema": 1,
            "now": history.now(),
            "events": _EVENTS.dump_python(history.events(since=since), mode="json"),
            "marks": [{"name": mark.name, "at": mark.at} for mark in history.marks.values()],
        }
        if query.recorded:
            if services.recorders is None:
                raise NotAvailable("the workers have no recorders: recorder_dir is not set")
            body["recorded"] = await services.recorders.samples(since)
        # Anybody may ask, and an hour of many ranks is megabytes: not on the loop that proxies, and one at a time.
        async with history_turn:
            content = await asyncio.to_thread(lambda: _history_json(body, *history.readings(since, step)))
        return Response(content, media_type="application/json")

    @router.get("/memory/events", responses={200: {"content": {"text/event-stream": {}}}})
    async def events(request: Request, query: Annotated[EventsQuery, Query()]) -> Response:
        """Return what happened, newest first; with ``Accept: text/event-stream`` reports and events as they come."""
        if "text/event-stream" in request.headers.get("accept", ""):
            peer = None if services.control.caller(request) is not None else peer_of(request)
            if not history.can_watch(peer):
                raise NotAvailable(
                    "as many readers follow the events as may, in all or from your address; close one, poll, or send "
                    "the admin token, for whose holders places are kept"
                )
            return _Live(services, peer)
        listed = _EVENTS.dump_python(history.events(limit=query.limit), mode="json")
        return JSONResponse({"schema": 1, "events": listed})

    @router.post("/memory/marks", status_code=201)
    async def mark(body: MarkRequest, caller: Caller = control) -> JSONResponse:
        """Name this moment; ``/memory?since=NAME`` then shows what changed."""
        report = await services.poller.poll()
        made = history.mark(body.name, () if report.stale else report.ranks, caller=caller)
        known = {"name": made.name, "at": made.at, "ranks": [asdict(rank)["rank"] for rank in made.ranks]}
        return JSONResponse({"schema": 1, **known, "kept": MARKS_KEPT}, 201)

    return router


class Alias:
    """A short name for a hash, the same as long as this process lives.

    A part of the hash itself would still show whether a given image is cached: whoever has the image can make its hash.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def __call__(self, mm_hash: object) -> str:
        """Eight hexadecimal digits."""
        return hashlib.blake2b(str(mm_hash).encode(), key=self._key, digest_size=4).hexdigest()


async def _entries(services: Services, *, may_ask: bool) -> tuple[EntriesReading | None, bool]:
    """The entries as far as the caller may have them read, and whether they are the recorders'.

    Raises:
        NotAvailable: They cannot be read.
    """
    report, can_call = services.poller.current(), services.poller.capabilities.collective_rpc
    all_records = services.recorders.records if services.recorders is not None else ()
    records = [record for record in all_records if record.status == "alive" and record.newest is not None]
    has_all = services.poller.is_recorded and all(record.table is not None for record in records)
    if has_all or (records and not can_call):
        return await services.entries.of_records(records), True
    if may_ask and not can_call:
        raise NotAvailable(report.engine.hint or "the worker extension is not loaded")
    if may_ask:
        try:
            return await services.entries.of_workers(), False
        except EngineError as exc:
            raise NotAvailable(str(exc)) from exc
    if services.entries.known is None and records:
        return await services.entries.of_records(records), True
    return services.entries.known, False


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


def _history_json(body: dict[str, Any], step: float, readings: list[dict[str, Any]]) -> bytes:
    """Piece by piece: one call that writes megabytes would hold the interpreter, and with it every other thread."""
    written = ",".join(json.dumps(reading, allow_nan=False, separators=(",", ":")) for reading in readings)
    return f'{json.dumps(body | {"step": step}, allow_nan=False)[:-1]}, "readings": [{written}]}}'.encode()


class _Live(StreamingResponse):
    """The live events, for one watcher: counted from before its first byte is sent."""

    def __init__(self, services: Services, peer: str | None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self._services = services
        self._peer = peer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.history.watch(self._peer) as queue:
            self.body_iterator = _live(self._services, queue)
            await super().__call__(scope, receive, send)


async def _live(services: Services, queue: asyncio.Queue[Told | None]) -> AsyncIterator[bytes]:
    """The report now, and then every report and event; ends when the sidecar stops or the reader is too slow."""
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
