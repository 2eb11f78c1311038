"""The route of the findings: what is wrong, wherever it was found. It calls no worker, so everybody may read it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from fastapi import APIRouter, Response
from pydantic import TypeAdapter

from highwater.diagnose.case import Setup, Where, of_report
from highwater.diagnose.finding import WEIGHTS, Finding
from highwater.diagnose.incident import Headline
from highwater.diagnose.rules.book import Explained, judged
from highwater.diagnose.rules.setup import SetupCheck, checked
from highwater.host.report import GrownPart, HostReport
from highwater.http.services import NO_STORE, Parts, Services
from highwater.model.report import SCHEMA, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFinding(Finding):
    """A finding, and where it was found: in an open incident, the engine that runs, its start, its host, the set-up."""

    where: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsAnswer:
    """The findings, the weightiest first; and every question of the set-up, with what is as it should be."""

    schema: int = SCHEMA
    findings: tuple[FoundFinding, ...]
    checks: tuple[SetupCheck, ...]


_ANSWER: Final = TypeAdapter(FindingsAnswer)

router = APIRouter(tags=["memory"])


@router.get("/memory/findings", response_model=FindingsAnswer)
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
    asked = _setup(services, report, headlines)
    setup = of_report("set-up", report, explanation=start.explanation, host=host, setup=asked)
    running = of_report("running", report, baseline=services.poller.life.baseline, series=services.growth.verdicts())
    found: dict[Where, Iterable[Finding]] = {
        "incident": services.incidents.open_findings,
        "running": judged(running),
        "start": start.findings,
        "host": judged(at_host),
        "set-up": judged(setup),
    }
    return _ANSWER.dump_json(FindingsAnswer(findings=_placed(found), checks=checked(setup)))


def _setup(services: Services, report: Report, headlines: list[Headline]) -> Setup:
    folder = services.incidents.folder
    return Setup(
        now=services.history.now(),
        report=report,
        policy_source=services.policy.source,
        policy_kept_in=services.policy.kept_in,
        incidents=headlines,
        incidents_folder=None if folder is None else str(folder),
        incidents_problem=services.incidents.problem,
        has_engine_log=services.incidents.has_log,
        events=services.history.events(),
    )


def _placed(found: Mapping[Where, Iterable[Finding]]) -> tuple[FoundFinding, ...]:
    """Return all of them, the weightiest first; the set-up names what another place has found no second time."""
    named = {one.name for where, findings in found.items() if where != "set-up" for one in findings}
    placed = [
        FoundFinding(where=where, **{part.name: getattr(one, part.name) for part in fields(one)})
        for where, findings in found.items()
        for one in findings
        if where != "set-up" or one.name not in named
    ]
    return tuple(sorted(placed, key=lambda one: WEIGHTS.index(one.weight)))
