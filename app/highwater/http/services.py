"""Shared by all handlers: the parts that ``main`` wired, strict request models, JSON or text responses.

Any caller may ask for what takes a while (the start explained, a plan, the findings): one at a time, off the loop that
proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, TypeAlias

from fastapi import Depends, Request, Response
from fastapi.openapi.models import HTTPBearer
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security.base import SecurityBase
from pydantic import BaseModel, ConfigDict

from gated_proxy.door_items import RequestItems
from highwater.act.governor import Governor, PolicyStore
from highwater.act.relief import Relief
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.rules.book import Explained, explained
from highwater.engine.client import EngineResponse
from highwater.explain.explanation import explain
from highwater.explain.live_engine import LiveEngine, LiveWorker, live_engine
from highwater.growth.watch import GrowthWatch
from highwater.host.watch import HostWatch
from highwater.http.access import Access
from highwater.http.metrics import EnginePage, Exporter
from highwater.model.rank import RankReading
from highwater.model.report import SCHEMA, Caller, Report
from highwater.process.errors import EXIT_STATUS_HEADER, OK, NotAvailable, TooManyWaiting
from highwater.watch.history import History
from highwater.watch.poller import Poller
from highwater.watch.recorder.recorders import Recorders
from highwater.watch.snapshots import Snapshots
from highwater.watch.sources import EncoderCacheEntries, EngineBudgets

# Plans that may wait for the one that is computed.
MAX_WAITING: Final = 4
FINDINGS_SECONDS: Final = 1.0
WHY_MISSING: Final = (
    "nothing reports its start; set HIGHWATER_RECORDER_DIR for vLLM and recorder_dir for the sidecar, or load the "
    "worker extension in development mode"
)


class StartReports:
    """The running engine's start, as its workers reported it: for the budget, and for plans that begin from it."""

    def __init__(self, budgets: EngineBudgets) -> None:
        self._budgets = budgets
        self._last: tuple[Report, Explained] | None = None
        self._turn = asyncio.Lock()

    def live_engine(self, report: Report) -> LiveEngine:
        """Return the first data-parallel engine.

        Raises PlanError with rank and figure where one is not reported, NotAvailable where no engine is read at all.
        """
        if not report.ranks:
            why = report.engine.hint or f"the engine is {report.engine.state}"
            raise NotAvailable(f"no worker of a running engine is read, so none can be planned: {why}")
        first = report.ranks[0].dp_rank if report.ranks else None
        return live_engine(
            [
                LiveWorker(reading, budget)
                for reading in report.ranks
                if reading.dp_rank == first and (budget := self._budgets.budget_of(reading)) is not None
            ]
        )

    async def explained(self, report: Report) -> Explained:
        """Return the memory explained, once for each round: its readings and the engine's state are all it needs."""
        async with self._turn:
            last = self._last
            if last is None or last[0].ranks is not report.ranks or last[0].engine is not report.engine:
                last = self._last = report, await asyncio.to_thread(self._explained, report)
            return last[1]

    def _explained(self, report: Report) -> Explained:
        engine, budgets = report.engine, self._budgets

        def with_start(reading: RankReading) -> RankReading:
            reported = None if reading.start else budgets.of(reading.process)
            return reading if reported is None else replace(reading, start=reported.start)

        readings = [with_start(reading) for reading in report.ranks]
        explanation = explain(
            readings,
            budgets.budget_of,
            model=engine.model,
            vllm_version=engine.version,
            why_missing=WHY_MISSING,
        )
        if not readings:
            why = engine.hint or "its workers report nothing of their memory yet"
            explanation = replace(explanation, problems=(f"no rank is reported: {why}",))
        return explained(replace(report, ranks=tuple(readings)), explanation)


class Turns:
    """Lets one plan be computed at a time, and up to `most_waiting` wait."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._present = 0
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def next(self) -> AsyncIterator[None]:
        """Wait for the turn, which lasts until the context ends; raises TooManyWaiting where no more may wait."""
        waiting = self._present - 1
        if waiting >= self._most_waiting:
            raise TooManyWaiting(
                f"a plan is computed and {waiting} wait for theirs; at most {self._most_waiting} may wait"
            )
        self._present += 1
        try:
            async with self._turn:
                yield
        finally:
            self._present -= 1


class Fresh:
    """A response that is made once in so many seconds, whoever asks for it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: tuple[float, bytes] | None = None
        self._turn = asyncio.Lock()

    async def of(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        async with self._turn:
            now = asyncio.get_running_loop().time()
            if self._last is None or now - self._last[0] >= self._seconds:
                self._last = now, await make()
            return self._last[1]


@dataclass(frozen=True, slots=True)
class Services:
    """The wired parts; ``report`` returns the last one with its age, the policy's state and the verdicts on growth."""

    poller: Poller
    governor: Governor
    relief: Relief
    policy: PolicyStore
    history: History
    exporter: Exporter
    engine_page: EnginePage
    entries: EncoderCacheEntries
    starts: StartReports
    growth: GrowthWatch
    incidents: Incidents
    recorders: Recorders | None
    snapshots: Snapshots
    host: HostWatch
    report: Callable[[], Report]
    requests: Callable[[], Iterator[RequestItems]]
    alive: Callable[[], bool]
    stopping: Callable[[], bool]
    server_info: Callable[[str], Awaitable[EngineResponse]]
    control: Access
    # An hour of many ranks is megabytes, a plan takes some hundred trials, findings ask every rule: one each at a time.
    history_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    plan_turns: Turns = field(default_factory=lambda: Turns(MAX_WAITING))
    findings: Fresh = field(default_factory=lambda: Fresh(FINDINGS_SECONDS))


async def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


class _AdminToken(SecurityBase):
    """The caller of a control path, which the OpenAPI page says of it."""

    def __init__(self) -> None:
        self.model = HTTPBearer(description="the admin token; `highwater token` prints it")
        self.scheme_name = "AdminToken"

    async def __call__(self, request: Request) -> Caller:
        """Return the caller; raises HTTPException: 401 without the token or with a wrong one, 403 if none exists."""
        control: Access = request.app.state.services.control
        return control.admitted(request)


class _MaybeAdmin(_AdminToken):
    """The same where a dry run needs no token: the route admits the caller of any other call."""

    async def __call__(self, request: Request) -> Callable[[], Caller]:  # type: ignore[override]
        control: Access = request.app.state.services.control
        return lambda: control.admitted(request)


NEEDS_TOKEN: Final = Depends(_AdminToken())
Parts: TypeAlias = Annotated[Services, Depends(services_of)]
Admin: TypeAlias = Annotated[Caller, NEEDS_TOKEN]
# Called, it admits the caller as `Admin` does.
MaybeAdmin: TypeAlias = Annotated[Callable[[], Caller], Depends(_MaybeAdmin())]

# For what no cache may keep, and no browser may guess the type of.
NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# What a route says of its responses on the OpenAPI page where it takes a `FormatQuery`.
OR_TEXT: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/plain": {}}}}


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FormatQuery(StrictModel):
    format: Literal["json", "text"] | None = None


def wants_text(request: Request, chosen: str | None = None) -> bool:
    if chosen is not None:
        return chosen == "text"
    accept = request.headers.get("accept", "")
    return "text/plain" in accept and "application/json" not in accept


def in_form(
    request: Request,
    text: Callable[[], str],
    body: Callable[[], Mapping[str, Any] | bytes],
    *,
    ends_with: int = OK,
    status: int = 200,
    headers: Mapping[str, str] = {},
    chosen: str | None = None,
) -> Response:
    """Return an answer as text or as JSON, whichever the caller wants; ``body`` is an object, or JSON itself."""
    headers = {**headers, **ending(ends_with)}
    if wants_text(request, chosen):
        return PlainTextResponse(text(), status, headers)
    made = body()
    if isinstance(made, bytes):
        return Response(made, status, headers, media_type="application/json")
    return JSONResponse({"schema": SCHEMA, **made}, status, headers)


def ending(status: int) -> dict[str, str]:
    """Return the header by which a command that shows this response knows its exit status."""
    return {EXIT_STATUS_HEADER: str(status)}
