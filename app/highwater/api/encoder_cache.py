"""``GET /memory/encoder-cache``: the entries, from the recorders if they have them, else from the workers."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from pydantic_core import to_json

from highwater.api.requests import StrictModel
from highwater.api.services import Services
from highwater.errors import EngineError, NotAvailable, UnknownName
from highwater.memory.encoder_cache import EntriesReading, RankEntries
from highwater.readings.report import Report
from highwater.readings.schema import SCHEMA
from highwater.text.table import missing_text

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


def encoder_cache_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["memory"])
    alias = Alias()

    @router.get("/memory/encoder-cache")
    async def encoder_cache(request: Request, query: Annotated[EntriesQuery, Query()]) -> Response:
        """Return what the encoder cache of each rank holds.

        If every worker has a recorder, its entries are returned. Else the workers are called, with the admin
        token and once a second at most; without the token no worker is called, and the response has what the recorders
        show, what was last read of the other workers, its age, and which ranks nothing is known of. Without the token
        `mm_hash` is a short name that does not identify the image.
        """
        may_ask = services.control.caller(request) is not None
        reading = await _entries(services, may_ask=may_ask)
        report = services.poller.current()
        pids = {rank.pid for rank in report.ranks}
        # The entries of earlier workers say nothing about those that run now.
        known = [] if reading is None else [rank for rank in reading.ranks if rank.head.get("pid") in pids]
        names = [rank.head.get("rank") for rank in known]
        if query.rank is not None and query.rank not in names and known:
            raise UnknownName("rank", query.rank, [str(rank) for rank in names])
        age = round(services.entries.age_seconds(reading), 3) if reading is not None and known else None
        wanted = [rank for rank in known if query.rank in (None, rank.head.get("rank"))]
        ranks = [await rank.json(query.limit, query.sort, None if may_ask else alias) for rank in wanted]
        head = to_json({"schema": SCHEMA, "age_seconds": age, "note": _note(known, report, may_ask=may_ask)})
        return Response(head[:-1] + b',"ranks":[' + b",".join(ranks) + b"]}", media_type="application/json")

    return router


class Alias:
    """A short name for a hash, the same while this process runs.

    A part of the hash itself would show whether a given image is cached to everybody who has the image.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def __call__(self, mm_hash: object) -> str:
        return hashlib.blake2b(str(mm_hash).encode(), key=self._key, digest_size=4).hexdigest()


async def _entries(services: Services, *, may_ask: bool) -> EntriesReading | None:
    """Return the entries as far as the caller may have them read. Raises NotAvailable where they cannot be read."""
    recorded, entries = services.poller.coverage, services.entries
    if recorded.has_entries:
        return await entries.of_records(recorded.writing)
    if may_ask and services.poller.capabilities.collective_rpc:
        try:
            return await entries.of_workers()
        except EngineError as exc:
            raise NotAvailable(str(exc)) from exc
    if may_ask and not recorded.writing:
        raise NotAvailable(services.poller.current().engine.hint or "the worker extension is not loaded")
    return await entries.as_known(recorded.writing)


def _note(known: Sequence[RankEntries], report: Report, *, may_ask: bool) -> str | None:
    if not known and not may_ask:
        return NOT_READ
    without = None if may_ask else SHORTENED if all(rank.is_recorded for rank in known) else NOT_ASKED
    listed = {rank.head.get("pid") for rank in known if rank.head.get("entries_total") is not None}
    unlisted = [rank for rank in report.ranks if rank.pid not in listed]
    names = [rank.name for rank in unlisted]
    names += [missing_text([rank]) for rank in report.ranks_missing]
    missing = f"the entries of {', '.join(names)} are not known" if names else None
    return "; ".join(text for text in (missing, without) if text) or None
