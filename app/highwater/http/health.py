"""How the sidecar and the engine are: probes, metrics, and the findings of what is wrong. No worker is called."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field, TypeAdapter

from highwater.diagnose.case import Setup, of_report
from highwater.diagnose.evidence import Headline
from highwater.diagnose.finding import WEIGHTS, Finding, FoundFinding, Where
from highwater.diagnose.rules.book import Explained, judged
from highwater.diagnose.rules.setup import SetupCheck, checked
from highwater.diagnose.verdict import verdict
from highwater.host.report import GrownPart, HostReport
from highwater.http.metrics import CONTENT_TYPE
from highwater.http.services import NO_STORE, Parts, Services, StrictModel
from highwater.model.report import SCHEMA, Report

probes = APIRouter(tags=["health"])
router = APIRouter()


class MetricsQuery(StrictModel):
    engine: bool = Field(True, description="with the engine's own families; 0: the sidecar's alone")


@probes.get("/livez", responses={503: {"description": "a loop of the sidecar has ended"}})
async def livez(parts: Parts) -> JSONResponse:
    """Report that the sidecar itself runs. Never depends on the engine."""
    alive = parts.alive()
    return JSONResponse({"status": "ok" if alive else "a loop has ended"}, 200 if alive else 503)


@probes.get("/readyz", responses={503: {"description": "requests would not be served now"}})
async def readyz(parts: Parts) -> JSONResponse:
    """Report whether the engine would serve a request sent here now, and if not, why not."""
    engine = parts.poller.current().engine
    ready = engine.traits.serves and not parts.stopping()
    reason = "the sidecar is stopping" if parts.stopping() else engine.hint or engine.state_text
    answer = {"ready": ready, "engine": engine.state, "reason": None if ready else reason}
    return JSONResponse(answer, 200 if ready else 503)


@probes.get(
    "/health/deep",
    responses={503: {"description": "the engine does not run, or will not go on by itself"}},
)
async def deep(parts: Parts) -> JSONResponse:
    """Report whether the engine runs, or will by itself: for a liveness probe of vLLM's own container.

    vLLM's `/health` answers 200 also while the engine hangs. One that starts, sleeps, is paused, slow or in a long
    step is healthy, and so are one that does not answer where no recorder shows why, and one whose loop runs and
    schedules nothing. One that ended is not, until something shows that the next one loads.
    """
    report = parts.report()
    engine, judged = report.engine, verdict(report)
    healthy = judged.reason == "starved" or not engine.traits.is_lost
    reason = None if healthy and engine.hint is None else judged.with_step
    answer = {"healthy": healthy, "engine": engine.state, "reason": reason}
    return JSONResponse(answer, 200 if healthy else 503)


@router.get("/metrics", tags=["health"], response_class=Response)
async def metrics(parts: Parts, query: Annotated[MetricsQuery, Query()]) -> Response:
    """The last report in Prometheus' classic text format, and the engine's own families as of now.

    Those are left out where the engine does not give them within a quarter of a second, and with `?engine=0`.
    """
    engine = await parts.engine_page.read() if query.engine else b""
    return Response(parts.exporter.page() + engine, media_type=CONTENT_TYPE)


# --- the findings ---


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsAnswer:
    """The findings, the weightiest first; and every question of the set-up, with what is as it should be."""

    schema: int = SCHEMA
    findings: tuple[FoundFinding, ...]
    checks: tuple[SetupCheck, ...]


_ANSWER: Final = TypeAdapter(FindingsAnswer)


@router.get("/memory/findings", tags=["memory"], response_model=FindingsAnswer)
async def findings(parts: Parts) -> Response:
    """Return every finding by its name, with weight, figures and advice, and the checks of the set-up.

    No worker is called.
    """

    async def judge() -> bytes:
        host, headlines = await parts.host.report(), await parts.incidents.headlines()
        report = parts.report()
        start = await parts.starts.explained(report)
        return await asyncio.to_thread(_judged, parts, report, start, host, headlines)

    # An incident's summary may quote the log.
    return Response(await parts.findings.of(judge), media_type="application/json", headers=NO_STORE)


def _judged(services: Services, report: Report, start: Explained, host: HostReport, headlines: list[Headline]) -> bytes:
    grown: tuple[GrownPart, ...] = () if services.host.now is None else services.host.now.parts
    at_host = of_report("host", report, host=host, host_grown=grown)
    folder = services.incidents.folder
    asked = Setup(
        now=services.history.now(),
        report=report,
        policy_source=services.policy.source,
        policy_kept_in=services.policy.kept_in,
        incidents=headlines,
        incidents_folder=None if folder is None else str(folder),
        incidents_problem=services.incidents.problem,
        has_engine_log=services.incidents.has_log,
        log_problem=services.incidents.log_problem,
        recorder_problem=None if services.recorders is None else services.recorders.problem,
        events=services.history.events(),
    )
    setup = of_report("set-up", report, explanation=start.explanation, host=host, setup=asked)
    running = of_report("running", report, baseline=services.poller.life.baseline, series=services.growth.verdicts())
    found: dict[Where, Iterable[Finding]] = {
        "incident": services.incidents.open_findings,
        "running": judged(running),
        "start": start.findings,
        "host": judged(at_host),
        "set-up": judged(setup),
    }
    # The set-up names what another place has found no second time.
    named = {one.name for where, findings in found.items() if where != "set-up" for one in findings}
    placed = [
        FoundFinding(where=where, **{part.name: getattr(one, part.name) for part in fields(one)})
        for where, findings in found.items()
        for one in findings
        if where != "set-up" or one.name not in named
    ]
    placed.sort(key=lambda one: WEIGHTS.index(one.weight))
    return _ANSWER.dump_json(FindingsAnswer(findings=tuple(placed), checks=checked(setup)))
