"""What gives memory back on request: reclaim, vLLM's own resets as drop-ins, and the policy."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from app.governor import Measured
from app.policy import SIGNAL_REMEDIES, Rule
from app.policy_settings import PolicyChange
from app.readings import Components, Event, Mode, PolicyStatus, RankDelta, RankReading
from app.routes.services import Services

DECISIONS_SHOWN = 20
_FORBID = ConfigDict(extra="forbid")
_RANKS = TypeAdapter(tuple[RankReading, ...])
_DELTAS = TypeAdapter(tuple[RankDelta, ...])
_COMPONENTS = TypeAdapter(Components)
_RULES = TypeAdapter(tuple[Rule, ...])
_STATUS = TypeAdapter(PolicyStatus)
_EVENTS = TypeAdapter(list[Event])
# Ours, taken off the query string of the drop-in paths; everything else goes to vLLM as it is.
_OWN_PARAMETERS = ("mode", "force")


class ReclaimRequest(BaseModel):
    """The body of ``POST /memory/reclaim``; all of it may be left out."""

    model_config = _FORBID

    remedies: list[str] = Field(default=list(SIGNAL_REMEDIES["device_used_ratio"]), min_length=1, max_length=16)
    mode: Mode = "safe"
    dry_run: bool = False


def control_router(services: Services) -> APIRouter:
    """``/memory/reclaim``, the resets and ``/policy``."""
    router = APIRouter(tags=["control"])
    governor = services.governor
    control = [Depends(services.control)]

    @router.post(
        "/memory/reclaim",
        dependencies=control,
        responses={409: {"description": "Every remedy was refused; the body is as with 200"}},
    )
    async def reclaim(body: Annotated[ReclaimRequest | None, Body()] = None) -> JSONResponse:
        """Run remedies in order and tell what each gave back, per rank."""
        wanted = body or ReclaimRequest()
        results = await governor.reclaim(wanted.remedies, mode=wanted.mode, dry_run=wanted.dry_run)
        outcomes = {measured.result.outcome for measured in results}
        answer = {"schema": 1, "mode": wanted.mode, "dry_run": wanted.dry_run, "results": [_shown(m) for m in results]}
        return JSONResponse(answer, 409 if outcomes == {"refused"} and not wanted.dry_run else 200)

    for remedy in governor.remedies.values():
        if remedy.path is not None:
            _add_drop_in(router, services, remedy.name, remedy.path)

    @router.get("/policy")
    async def policy() -> JSONResponse:
        """The rules, their state and the last decisions."""
        return JSONResponse(_policy(services))

    @router.put("/policy", dependencies=control)
    async def change_policy(change: PolicyChange) -> JSONResponse:
        """Replace the mode, the rules or both; validated whole, and recorded."""
        rules = governor.rules if change.rules is None else tuple(rule.rule() for rule in change.rules)
        mode = change.mode or governor.mode
        named = ", ".join(rule.name for rule in rules) or "none"
        governor.replace_policy(rules, mode, f"policy changed: mode {mode}, rules {named}")
        return JSONResponse(_policy(services))

    return router


def _policy(services: Services) -> dict[str, Any]:
    governor = services.governor
    decisions = [event for event in services.history.events() if event.kind == "policy" or event.trigger == "policy"]
    return {
        "schema": 1,
        "mode": governor.mode,
        "rules": _RULES.dump_python(governor.rules, mode="json"),
        "status": _STATUS.dump_python(governor.status(), mode="json"),
        "last_decisions": _EVENTS.dump_python(decisions[:DECISIONS_SHOWN], mode="json"),
    }


def _add_drop_in(router: APIRouter, services: Services, name: str, path: str) -> None:
    @router.post(
        path,
        name=name,
        dependencies=[Depends(services.control)],
        responses={503: {"description": "The engine is not there, or went in the middle of it"}},
    )
    async def drop_in(request: Request, mode: Mode = "now", force: bool = False) -> JSONResponse:
        """As vLLM's own, query string and all; the answer is vLLM's and what the reset gave back."""
        pairs = request.scope["query_string"].decode("latin-1").split("&")
        kept = "&".join(pair for pair in pairs if pair and pair.partition("=")[0] not in _OWN_PARAMETERS)
        measured = await services.governor.drop_in(name, query=kept, mode=mode, force=force)
        if measured.answer is None:
            return JSONResponse({"schema": 1, **_shown(measured)}, 503)
        body = measured.answer.json_object() | {"schema": 1} | _shown(measured)
        return JSONResponse(body, measured.answer.status)


def _shown(measured: Measured) -> dict[str, Any]:
    result = measured.result
    return {
        "remedy": result.remedy,
        "outcome": result.outcome,
        "reason": result.reason,
        "seconds": round(result.seconds, 3),
        "freed_bytes": {
            "total": result.freed_bytes,
            "components": _COMPONENTS.dump_python(result.freed_components),
            "ranks": _DELTAS.dump_python(result.ranks, mode="json"),
        },
        "before": _RANKS.dump_python(measured.before, mode="json"),
        "after": _RANKS.dump_python(measured.after, mode="json"),
        "frees": result.frees,
        "does_not_free": result.spares,
    }
