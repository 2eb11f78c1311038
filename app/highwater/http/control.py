"""Routes that give memory back on request: reclaim, vLLM's own resets as drop-ins, and the restore after a trim.

Also the engine's ``/server_info``, behind the token: it has the whole configuration, secrets included.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field, TypeAdapter, model_validator

from highwater.act.relief import RemedyOutcome, RemedyRequest
from highwater.act.remedies import REMEDIES
from highwater.diagnose.verdict import verdict
from highwater.http.services import NEEDS_TOKEN, NO_STORE, Admin, MaybeAdmin, Parts, StrictModel, ending, wants_text
from highwater.http.text.control import reclaim_text, restored_text
from highwater.model.rank import RankReading
from highwater.model.remedies import Mode, RemedyResult, Target
from highwater.model.report import SCHEMA
from highwater.process.errors import FAILED, OK, EngineError, NotAvailable, Refused

_RANKS: Final = TypeAdapter(tuple[RankReading, ...])
_RESULT: Final = TypeAdapter(RemedyResult)
# Taken off the query string of the drop-in paths; everything else goes to vLLM unchanged.
_OWN_PARAMETERS: Final = ("mode", "force")

router = APIRouter(tags=["control"])


class TrimRequest(StrictModel):
    """A trim and its target on every rank. Without a target it moves all that no running request still needs."""

    remedy: Literal["trim_encoder_cache"]
    free_bytes: int | None = Field(None, ge=0, strict=True, description="device bytes to let go")
    keep_bytes: int | None = Field(
        None, ge=0, strict=True, description="device bytes of encoder outputs to keep at most"
    )
    idle_seconds: float | None = Field(
        None, ge=0, strict=True, allow_inf_nan=False, description="let go what was not used so long"
    )

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        given = [name for name in ("free_bytes", "keep_bytes", "idle_seconds") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"one target at most; given: {', '.join(given)}")
        return self

    def request(self) -> RemedyRequest:
        return RemedyRequest(self.remedy, Target(**self.model_dump(exclude={"remedy"})))


class ReclaimRequest(StrictModel):
    """The body of ``POST /memory/reclaim``; all of it may be left out."""

    remedies: list[str | TrimRequest] | None = Field(
        None,
        min_length=1,
        max_length=16,
        description="names, in this order, each once; trim_encoder_cache also as an object with its target. Not given: "
        "release, and then reset_encoder_cache, or trim_encoder_cache on an engine without that",
    )
    mode: Mode = "safe"
    dry_run: bool = False

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        names = [each.remedy for each in self.requests()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"each remedy at most once; given more than once: {twice}")
        return self

    def requests(self) -> list[RemedyRequest]:
        return [RemedyRequest(entry) if isinstance(entry, str) else entry.request() for entry in self.remedies or ()]


class ReclaimQuery(StrictModel):
    dry_run: bool = Field(False, description="as in the body, and without the token")


@router.post(
    "/memory/reclaim",
    responses={409: {"description": "Every remedy was refused; the body is as with 200"}},
)
async def reclaim(
    request: Request,
    parts: Parts,
    admitted: MaybeAdmin,
    query: Annotated[ReclaimQuery, Query()],
    body: Annotated[ReclaimRequest | None, Body()] = None,
) -> Response:
    """Run remedies in order and return what each gave back, per rank.

    A dry run returns what each could give back by the last report, and calls no worker; with `?dry_run=true` it needs
    no token either.
    """
    wanted = body or ReclaimRequest()
    is_dry = query.dry_run or wanted.dry_run
    caller = None if is_dry else admitted()
    try:
        results = await parts.relief.reclaim(wanted.requests(), mode=wanted.mode, dry_run=is_dry, caller=caller)
    except NotAvailable as exc:
        if (report := parts.report()).engine.traits.is_up:
            raise
        judged = verdict(report)
        raise NotAvailable(f"{judged.sentence} {judged.step or ''}".rstrip()) from exc
    outcomes = {each.result.outcome for each in results}
    status = 409 if outcomes == {"refused"} and not is_dry else 200
    headers = ending(FAILED if not results or outcomes & {"refused", "failed"} else OK)
    if wants_text(request):
        return PlainTextResponse(reclaim_text(results, dry_run=is_dry), status, headers)
    answer = {
        "schema": SCHEMA,
        "mode": wanted.mode,
        "dry_run": is_dry,
        "results": [_shown(each) if is_dry else _with_ranks(each) for each in results],
    }
    return JSONResponse(answer, status, headers)


@router.post("/memory/encoder-cache/restore")
async def restore(request: Request, parts: Parts, caller: Admin) -> Response:
    """Bring every encoder output that a trim moved to host memory back to the device."""
    ranks = await parts.relief.restore(caller=caller)
    if wants_text(request):
        return PlainTextResponse(restored_text(ranks), headers=ending(OK))
    return JSONResponse({"schema": SCHEMA, "ranks": ranks}, headers=ending(OK))


@router.get("/server_info", dependencies=[NEEDS_TOKEN], responses={200: {"content": {"application/json": {}}}})
async def server_info(request: Request, parts: Parts) -> Response:
    """Return the engine's configuration as vLLM's development mode does, tokens included."""
    try:
        answer = await parts.server_info(request.scope["query_string"].decode("latin-1"))
    except EngineError as exc:
        raise NotAvailable(str(exc)) from exc
    return Response(answer.body, answer.status, media_type=answer.content_type or None, headers=NO_STORE)


async def drop_in(
    request: Request, parts: Parts, caller: Admin, mode: Mode = "now", force: bool = False
) -> JSONResponse:
    """Call vLLM's own reset, query string included; the response is vLLM's and what the reset gave back."""
    if mode == "safe" and "reset_running_requests" in request.query_params:
        # It preempts running requests, and up to 0.21 each may lose a token by it.
        raise Refused("mode=safe never preempts running requests: leave reset_running_requests out")
    pairs = request.scope["query_string"].decode("latin-1").split("&")
    query = "&".join(pair for pair in pairs if pair and pair.partition("=")[0] not in _OWN_PARAMETERS)
    name = request.scope["route"].name
    outcome = await parts.relief.drop_in(name, query=query, mode=mode, force=force, caller=caller)
    if outcome.answer is None:  # the engine stopped before it responded
        return JSONResponse({"schema": SCHEMA, **_with_ranks(outcome)}, 503)
    body = outcome.answer.json_object() | {"schema": SCHEMA} | _with_ranks(outcome)
    return JSONResponse(body, outcome.answer.status)


for remedy in REMEDIES:
    if remedy.path is not None:
        router.post(
            remedy.path,
            name=remedy.name,
            responses={503: {"description": "The engine is not reachable, or stopped during the reset"}},
        )(drop_in)


def _shown(outcome: RemedyOutcome) -> dict[str, Any]:
    shown: dict[str, Any] = _RESULT.dump_python(outcome.result, mode="json")
    freed, credited = ({"total": shown.pop(f"{name}_bytes")} for name in ("freed", "credited"))
    freed |= {"components": shown.pop("freed_components"), "ranks": shown.pop("ranks")}
    credited |= {"components": shown.pop("credited_components")}
    for name in ("seconds", "held_seconds"):
        shown[name] = None if shown[name] is None else round(shown[name], 3)
    return shown | {"freed_bytes": freed, "credited_bytes": credited}


def _with_ranks(outcome: RemedyOutcome) -> dict[str, Any]:
    ranks = {"before": outcome.before, "after": outcome.after}
    return _shown(outcome) | {name: _RANKS.dump_python(readings, mode="json") for name, readings in ranks.items()}
