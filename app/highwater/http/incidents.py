"""Routes of the incidents: the list, and each of them for programs, browsers and terminals."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final, Literal, TypeAlias

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from highwater.diagnose.incident import Incident
from highwater.diagnose.incidents.store import UnreadableIncident, listing, to_bytes
from highwater.http.services import NO_STORE, OR_TEXT, FormatQuery, Parts, StrictModel, ending, wants_text
from highwater.http.text import markdown
from highwater.http.text.incidents import headlines_text, incident_markdown
from highwater.process.exit_codes import OK

# A response may hold lines of a log: no cache keeps it, nothing guesses at its type, no other site learns its address.
_HEADERS: Final = NO_STORE | ending(OK) | {"Referrer-Policy": "no-referrer"}
_PAGE_POLICY: Final = f"{markdown.CONTENT_SECURITY_POLICY}; frame-ancestors 'none'; sandbox"
_PAGE_HEADERS: Final = _HEADERS | {"Content-Security-Policy": _PAGE_POLICY}

_Form: TypeAlias = Literal["json", "text", "html"]


class IncidentQuery(StrictModel):
    format: _Form | None = None


router = APIRouter(tags=["memory"])


@router.get("/memory/incidents", responses=OR_TEXT)
async def listed(request: Request, parts: Parts, query: Annotated[FormatQuery, Query()]) -> Response:
    """Return the incidents, newest first: the engine died, hung, had no memory left, or did not start."""
    incidents = parts.incidents
    headlines = await incidents.headlines()
    if wants_text(request, query.format):
        return PlainTextResponse(headlines_text(headlines, problem=incidents.problem), headers=_HEADERS)
    content = listing(headlines, incidents.folder, incidents.problem) | {"has_engine_log": incidents.has_log}
    return JSONResponse(content, headers=_HEADERS)


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
    # In a thread: it may be megabytes, and the data plane shares this loop.
    return await asyncio.to_thread(_rendered, incident, form or ("text" if wants_text(request) else "json"))


def _rendered(incident: Incident, form: _Form) -> Response:
    if form == "html":
        # Relative: it also leads back beneath a reverse proxy's prefix.
        back = '<p><a href="../../dashboard">Back to the dashboard</a></p>\n'
        page = markdown.page(incident_markdown(incident, charts=True), title=incident.id, above=back)
        return HTMLResponse(page, headers=_PAGE_HEADERS)
    if form == "text":
        return PlainTextResponse(incident_markdown(incident), headers=_HEADERS)
    return Response(to_bytes(incident), media_type="application/json", headers=_HEADERS)
