"""What the handlers share: the parts that ``main`` has wired, strict models, and the forms of a response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from pydantic import BaseModel, ConfigDict

from gated_proxy.door_items import RequestItems
from highwater.act.governor import Governor, PolicyStore
from highwater.act.relief import Relief
from highwater.diagnose.incidents.incidents import Incidents
from highwater.engine.client import EngineResponse
from highwater.growth.watch import GrowthWatch
from highwater.host.watch import HostWatch
from highwater.http.access import Access
from highwater.http.engine_page import EnginePage
from highwater.http.metrics import Exporter
from highwater.http.starts import Fresh, StartReports, Turns
from highwater.model.report import Caller, Report
from highwater.process.errors import EXIT_STATUS_HEADER
from highwater.watch.history import History
from highwater.watch.poller import Poller
from highwater.watch.recorder.recorders import Recorders
from highwater.watch.snapshots import Snapshots
from highwater.watch.sources import EncoderCacheEntries

# Plans that may wait for the one that is computed.
MAX_WAITING: Final = 4
FINDINGS_SECONDS: Final = 1.0


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
    """The caller of a control path; on the OpenAPI page, where ``ControlGuard`` reads which paths these are."""

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


def ending(status: int) -> dict[str, str]:
    """Return the header by which a command that shows this response knows its exit status."""
    return {EXIT_STATUS_HEADER: str(status)}
