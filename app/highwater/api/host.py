"""The route of host memory, by process and kind. It calls no worker, so everybody may read it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import TypeAdapter

from highwater.api.requests import OR_TEXT, FormatQuery, wants_text
from highwater.api.services import Services
from highwater.host.report import HostReport
from highwater.host.text import host_text

_REPORT = TypeAdapter(HostReport)


def host_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["memory"])

    @router.get("/memory/host", response_model=HostReport, responses=OR_TEXT)
    async def host(request: Request, query: Annotated[FormatQuery, Query()]) -> Response:
        """Return host memory by process and kind, the container, `/dev/shm` and vLLM's processor caches.

        As tables with ``Accept: text/plain`` or ``?format=text``. No worker is called.
        """
        report = await services.host.report()
        if wants_text(request, query.format):
            return PlainTextResponse(await asyncio.to_thread(host_text, report))
        return Response(await asyncio.to_thread(_REPORT.dump_json, report), media_type="application/json")

    return router
