"""The sidecar's own health, and its metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from highwater.diagnose.verdict import verdict
from highwater.http.metrics import CONTENT_TYPE
from highwater.http.services import Parts, StrictModel

router = APIRouter(tags=["health"])


class MetricsQuery(StrictModel):
    engine: bool = Field(True, description="with the engine's own families; 0: the sidecar's alone")


@router.get("/livez", responses={503: {"description": "a loop of the sidecar has ended"}})
async def livez(parts: Parts) -> JSONResponse:
    """Report that the sidecar itself runs. Never depends on the engine."""
    alive = parts.alive()
    return JSONResponse({"status": "ok" if alive else "a loop has ended"}, 200 if alive else 503)


@router.get("/readyz", responses={503: {"description": "requests would not be served now"}})
async def readyz(parts: Parts) -> JSONResponse:
    """Report whether the engine would serve a request sent here now, and if not, why not."""
    engine = parts.poller.current().engine
    ready = engine.traits.serves and not parts.stopping()
    reason = "the sidecar is stopping" if parts.stopping() else engine.hint or engine.state_text
    answer = {"ready": ready, "engine": engine.state, "reason": None if ready else reason}
    return JSONResponse(answer, 200 if ready else 503)


@router.get("/health/deep", responses={503: {"description": "the engine does not run, or will not go on by itself"}})
async def deep(parts: Parts) -> JSONResponse:
    """Report whether the engine runs, or will by itself: for a liveness probe of vLLM's own container.

    vLLM's `/health` answers 200 also while the engine hangs. One that starts, sleeps, is paused, slow or in a long
    step is healthy, and so are one that does not answer where no recorder shows why, and one whose loop runs and
    schedules nothing. One that ended is not, until something shows that the next one loads.
    """
    report = parts.report()
    engine, progress = report.engine, report.progress
    is_starved = engine.state == "stuck" and progress is not None and progress.is_starved
    healthy = is_starved or not engine.traits.is_lost
    judged = verdict(report)
    reason = None if healthy and engine.hint is None else f"{judged.sentence} {judged.step or ''}".rstrip()
    answer = {"healthy": healthy, "engine": engine.state, "reason": reason}
    return JSONResponse(answer, 200 if healthy else 503)


@router.get("/metrics", response_class=Response)
async def metrics(parts: Parts, query: Annotated[MetricsQuery, Query()]) -> Response:
    """The last report in Prometheus' classic text format, and the engine's own families as of now.

    Those are left out where the engine does not give them within a quarter of a second, and with `?engine=0`.
    """
    engine = await parts.engine_page.read() if query.engine else b""
    return Response(parts.exporter.page() + engine, media_type=CONTENT_TYPE)
