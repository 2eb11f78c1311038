"""``GET /memory`` and its marks, growth, host memory by process, the encoder cache's entries; the budget and plans.

Reading calls no worker, but for the entries: from the recorders if they have them, else from the workers. Budget and
plans are computed from what the workers reported, so any caller may send them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter
from pydantic_core import to_json

from gated_proxy.door_items import RequestItems
from highwater.diagnose.case import of_report
from highwater.diagnose.finding import in_words
from highwater.diagnose.rules.book import Explained, known_causes
from highwater.diagnose.verdict import JudgedReport
from highwater.explain.live import grant_live, live_json, plan_live
from highwater.explain.wish import EXAMPLE, MAX_TEXT, parse_wish
from highwater.growth.series import Floor
from highwater.growth.words import growth_table, leaks
from highwater.host.report import HostReport
from highwater.http.services import OR_TEXT, Admin, FormatQuery, Parts, StartReports, StrictModel, in_form, wants_text
from highwater.http.text.budget import budget_text
from highwater.http.text.control import marked_text
from highwater.http.text.host import host_text
from highwater.http.text.report import report_text
from highwater.model.engine import missing_text
from highwater.model.growth import SeriesGrowth
from highwater.model.remedies import RankDelta, compare
from highwater.model.report import SCHEMA, Report
from highwater.model.units import ceil_div
from highwater.process.errors import ATTENTION, FAILED, OK, CannotPlan, EngineError, NotAvailable, UnknownName
from highwater.watch.history import MARKS_KEPT
from highwater.watch.sources import EntriesReading
from kvplan import PlanError

_REPORT: Final = TypeAdapter(JudgedReport)
_DELTAS: Final = TypeAdapter(tuple[RankDelta, ...])
_HOST: Final = TypeAdapter(HostReport)

router = APIRouter(tags=["memory"])


NO_MARKS: Final = "none yet, `highwater mark NAME` makes one"


class MemoryQuery(FormatQuery):
    since: str | None = Field(None, max_length=128, description="a mark: adds what changed since")


@router.get("/memory", response_model=JudgedReport, responses=OR_TEXT)
async def memory(request: Request, parts: Parts, query: Annotated[MemoryQuery, Query()]) -> Response:
    """Return the memory as of the last poll; as a table with ``Accept: text/plain`` or ``?format=text``."""
    report = JudgedReport.of(parts.report())
    if wants_text(request, query.format):
        return PlainTextResponse(report_text(report))
    if query.since is None:
        return Response(_REPORT.dump_json(report), media_type="application/json")
    marks = parts.history.marks
    mark = marks.get(query.since)
    if mark is None:
        raise UnknownName("since", query.since, [repr(known) for known in marks] or [NO_MARKS])
    since = {
        "mark": mark.name,
        "at": mark.at,
        "ranks": _DELTAS.dump_python(compare(mark.ranks, report.ranks), mode="json"),
    }
    return JSONResponse(_REPORT.dump_python(report, mode="json") | {"since": since})


class MarkRequest(StrictModel):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$", examples=["after bench"])


@router.post("/memory/marks", status_code=201)
async def mark(request: Request, parts: Parts, body: MarkRequest, caller: Admin) -> Response:
    """Name this moment; ``/memory?since=NAME`` then shows what changed."""
    report = await parts.poller.poll()
    new = parts.history.mark(body.name, () if report.stale else report.ranks, caller=caller)
    answer = {"name": new.name, "at": new.at, "ranks": [rank.rank for rank in new.ranks], "kept": MARKS_KEPT}
    return in_form(request, lambda: marked_text(new), lambda: answer, status=201)


class GrowthQuery(FormatQuery):
    series: str | None = Field(None, max_length=256, description="one series by its name, with its floors")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFloor:
    """One floor of a series: its value, and the engine's work until then."""

    at: float
    value: float
    requests: float | None
    images: float | None
    new_images: float | None
    tokens: float | None
    sleeps: float | None

    @classmethod
    def of(cls, floor: Floor) -> GrowthFloor:
        counts = {name: getattr(floor, name) for name in ("requests", "images", "new_images", "tokens", "sleeps")}
        known = {name: None if math.isnan(count) else count for name, count in counts.items()}
        return cls(at=floor.wall, value=floor.value, **known)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthAnswer:
    """The verdicts, the leaks first; with the floors of a series that was requested by name, oldest first."""

    schema: int = SCHEMA
    series: tuple[SeriesGrowth, ...]
    floors: tuple[GrowthFloor, ...] = ()
    # The known causes of what has grown since the engine was ready, a paragraph each, with the first thing to do.
    causes: tuple[str, ...] = ()


_GROWTH: Final = TypeAdapter(GrowthAnswer)


@router.get("/memory/growth", response_model=GrowthAnswer, responses=OR_TEXT)
async def growth(request: Request, parts: Parts, query: Annotated[GrowthQuery, Query()]) -> Response:
    """Return the verdict on every series of memory: flat, plateau, step, leak or not known.

    With ``series`` its verdict alone, and the floors behind it.
    """
    verdicts = parts.growth.verdicts()
    floors: tuple[GrowthFloor, ...] = ()
    if query.series is not None:
        found = parts.growth.find(query.series)
        verdicts, floors = (found,), tuple(map(GrowthFloor.of, parts.growth.data(found.series, found.ground)))
    case = of_report("running", parts.poller.current(), baseline=parts.poller.life.baseline)
    causes = tuple(map(in_words, known_causes(case)))
    ends_with = ATTENTION if any(not one.is_over for one in leaks(verdicts)) else OK
    answer = GrowthAnswer(series=verdicts, floors=floors, causes=causes)
    forms = partial(growth_table, verdicts, causes), partial(_GROWTH.dump_json, answer)
    return in_form(request, *forms, ends_with=ends_with, chosen=query.format)


@router.get("/memory/host", response_model=HostReport, responses=OR_TEXT)
async def host(request: Request, parts: Parts, query: Annotated[FormatQuery, Query()]) -> Response:
    """Return host memory by process and kind, the container, `/dev/shm` and vLLM's processor caches.

    As tables with ``Accept: text/plain`` or ``?format=text``. No worker is called.
    """
    report = await parts.host.report()
    ends_with = ATTENTION if any(one.level == "warning" for one in report.findings) else OK
    forms = partial(host_text, report), partial(_HOST.dump_json, report)
    return await asyncio.to_thread(in_form, request, *forms, ends_with=ends_with, chosen=query.format)


# --- requests with images ---


class RequestsQuery(StrictModel):
    limit: int = Field(100, ge=0, le=10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsAnswer:
    """The running requests with images or videos, the newest first, then those that ended last."""

    schema: int = SCHEMA
    requests: tuple[RequestItems, ...]


_REQUESTS: Final = TypeAdapter(RequestsAnswer)


@router.get("/memory/requests", response_model=RequestsAnswer)
async def requests(request: Request, parts: Parts, query: Annotated[RequestsQuery, Query()]) -> Response:
    """Return which requests brought images and videos, of what size, and by whom: without any content.

    `client` is a hash of the API key, the first digits of its SHA-256; without the admin token a short name that does
    not identify it. `cost` is what all items take, `largest` the first few of them.
    """
    found = tuple(islice(parts.requests(), query.limit))
    if parts.control.caller(request) is None:
        found = tuple(replace(one, client=None if one.client is None else _alias(one.client)) for one in found)
    return Response(_REQUESTS.dump_json(RequestsAnswer(requests=found)), media_type="application/json")


# --- the encoder cache's entries ---

NOT_READ = (
    "the entries of this engine have not been read yet, and without the admin token no worker is called; send it, "
    "Authorization: Bearer TOKEN (`highwater token --port PORT` prints it)"
)
NOT_ASKED = "as last read; with the admin token the workers are called, and mm_hash is whole"
SHORTENED = "with the admin token mm_hash is whole"


class EntriesQuery(StrictModel):
    rank: int | None = None
    limit: int = Field(100, ge=0, le=10_000)
    sort: Literal["bytes", "age"] = "bytes"


_ALIAS_KEY: Final = secrets.token_bytes(16)


def _alias(mm_hash: object) -> str:
    """Return a short name for a hash, the same while this process runs.

    A part of the hash itself would show whether a given image is cached to everybody who has the image.
    """
    return hashlib.blake2b(str(mm_hash).encode(), key=_ALIAS_KEY, digest_size=4).hexdigest()


@router.get("/memory/encoder-cache")
async def encoder_cache(request: Request, parts: Parts, query: Annotated[EntriesQuery, Query()]) -> Response:
    """Return what the encoder cache of each rank holds.

    If every worker has a recorder, its entries are returned. Else the workers are called, with the admin
    token and once a second at most; without the token no worker is called, and the response has what the recorders
    show, what was last read of the other workers, its age, and which ranks nothing is known of. Without the token
    `mm_hash` is a short name that does not identify the image.
    """
    may_ask = parts.control.caller(request) is not None
    recorded, entries = parts.poller.coverage, parts.entries
    if recorded.has_entries:
        reading: EntriesReading | None = await entries.of_records(recorded.writing)
    elif may_ask and parts.poller.capabilities.collective_rpc:
        try:
            reading = await entries.of_workers()
        except EngineError as exc:
            raise NotAvailable(str(exc)) from exc
    elif may_ask and not recorded.writing:
        raise NotAvailable(parts.poller.current().engine.hint or "the worker extension is not loaded")
    else:
        reading = await entries.as_known(recorded.writing)
    report = parts.poller.current()
    pids = {rank.pid for rank in report.ranks}
    # The entries of earlier workers say nothing about those that run now.
    known = [] if reading is None else [rank for rank in reading.ranks if rank.head.get("pid") in pids]
    names = [rank.head.get("rank") for rank in known]
    if query.rank is not None and query.rank not in names and known:
        raise UnknownName("rank", query.rank, [str(rank) for rank in names])
    age = round(entries.age_seconds(reading), 3) if reading is not None and known else None
    wanted = [rank for rank in known if query.rank in (None, rank.head.get("rank"))]
    ranks = [await rank.json(query.limit, query.sort, None if may_ask else _alias) for rank in wanted]
    listed = {rank.head.get("pid") for rank in known if rank.head.get("entries_total") is not None}
    unlisted = [rank.name for rank in report.ranks if rank.pid not in listed]
    unlisted += [missing_text([rank]) for rank in report.ranks_missing]
    notes = [f"the entries of {', '.join(unlisted)} are not known"] if unlisted else []
    if not may_ask and not known:
        notes = [NOT_READ]
    elif not may_ask:
        notes.append(SHORTENED if all(rank.is_recorded for rank in known) else NOT_ASKED)
    head = to_json({"schema": SCHEMA, "age_seconds": age, "note": "; ".join(notes) or None})
    return Response(head[:-1] + b',"ranks":[' + b",".join(ranks) + b"]}", media_type="application/json")


# --- why it is that much, and what it would be with other flags ---

MAX_FLAGS: Final = 30
NO_BODY: Final = (
    'the body is empty; send a JSON object: vLLM\'s flags that are to be other, such as {"max_model_len": 163000}, '
    f'or a wish, such as {{"wish": "{EXAMPLE}"}}; {{}} plans the engine as it runs'
)
_EXPLAINED: Final = TypeAdapter(Explained)


@router.get("/memory/budget", response_model=Explained, responses=OR_TEXT)
async def budget(request: Request, parts: Parts, query: Annotated[FormatQuery, Query()]) -> Response:
    """Return the memory explained: the start's budget, the KV pool, the encoder, and what was not counted.

    As a picture and tables with ``Accept: text/plain`` or ``?format=text``. No worker is called.
    """
    answer = await parts.starts.explained(parts.poller.current())
    ends_with = OK if answer.explanation.ranks else FAILED
    forms = partial(budget_text, answer), partial(_EXPLAINED.dump_json, answer)
    return in_form(request, *forms, ends_with=ends_with, chosen=query.format)


class PlanRequest(BaseModel):
    """The body of ``POST /memory/plan``: the flags of vLLM to change, or a wish.

    Other keys are vLLM's other flags: refused with the reason why they cannot be planned live.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"max_model_len": 163000}]})
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    wish: str | None = Field(None, max_length=MAX_TEXT, examples=[EXAMPLE])
    images_per_prompt: int | None = Field(None, ge=0, le=100_000)
    max_model_len: JsonValue = None
    max_num_seqs: JsonValue = None
    max_num_batched_tokens: JsonValue = None
    gpu_memory_utilization: JsonValue = None
    kv_cache_memory_bytes: JsonValue = None
    kv_cache_dtype: JsonValue = None
    tensor_parallel_size: JsonValue = None
    num_gpu_blocks_override: JsonValue = None


@router.post("/memory/plan")
async def plan(parts: Parts, body: PlanRequest | None = None) -> dict[str, Any]:
    """Return the KV cache that the running engine would have under other flags, each figure with its grade."""
    if body is None:
        raise CannotPlan(NO_BODY)
    # Any caller may send it, and a search takes some hundred plans: off the loop that proxies, and one at a time.
    async with parts.plan_turns.next():
        return await asyncio.to_thread(plan_answer, body, parts.starts, parts.poller.current())


def plan_answer(body: PlanRequest, starts: StartReports, report: Report) -> dict[str, Any]:
    flags = body.model_dump(exclude={"wish", "images_per_prompt"}, exclude_none=True)
    if len(flags) > MAX_FLAGS:
        raise CannotPlan(f"{len(flags)} flags are too many; at most {MAX_FLAGS}")
    if body.wish is not None and (flags or body.images_per_prompt is not None):
        given = ", ".join(flags) or "images_per_prompt"
        raise CannotPlan(f"{given}: a wish is answered with the flags that it needs; give the wish alone")
    try:
        live = starts.live_engine(report)
        if body.wish is not None:
            caches = [rank.encoder_cache for rank in report.ranks if rank.encoder_cache is not None]
            fullest = max(caches, key=lambda cache: cache.held_bytes, default=None)
            cached_image = None
            if fullest is not None and fullest.entries and fullest.embeds:
                cached_image = ceil_div(fullest.embeds, fullest.entries)
            granted = grant_live(live, parse_wish(body.wish), cached_image)
            # The plan of its flags, or of the engine as it runs where none were found.
            chosen = dict(granted.chosen.flags) if granted.chosen is not None else {}
            images = chosen.pop("limit_mm_per_prompt", {}).get("image")
            return live_json(live, plan_live(live, chosen, images), granted)
        answer = live_json(live, plan_live(live, flags, body.images_per_prompt))
        if report.engine.traits.is_absent:
            answer["notes"].insert(0, f"The engine does not run ({report.engine.state}): this is of its last start.")
        return answer
    except PlanError as exc:
        raise CannotPlan(str(exc)) from exc
