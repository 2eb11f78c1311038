"""``/policy``: the policy as it stands, and changing it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter

from highwater.api.problems import ProblemAnswer
from highwater.api.services import Services
from highwater.policy.rules import PolicyChange
from highwater.readings.event import Caller, Event
from highwater.readings.policy import PolicyStatus
from highwater.readings.schema import SCHEMA

DECISIONS_SHOWN = 20
_STATUS = TypeAdapter(PolicyStatus)
_EVENTS = TypeAdapter(list[Event])


def policy_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["control"])
    control = Depends(services.control)

    @router.get("/policy")
    async def policy(request: Request) -> JSONResponse:
        """Return the rules, where they come from, their state, the last decisions, and whether the caller may act."""
        return JSONResponse(_shown(services) | {"caller": services.control.outcome(request)})

    @router.put(
        "/policy",
        responses={
            507: {"model": ProblemAnswer, "description": "The state file could not be written; all is as before"}
        },
    )
    async def change_policy(change: PolicyChange, caller: Caller = control) -> JSONResponse:
        """Replace the mode, the rules or both; validated whole, kept, and recorded.

        A rule whose waters this engine is known to be unable to reach at rest is refused.
        """
        services.governor.check(change.rules or ())
        policy = await services.policy.change(change)
        named = ", ".join(rule.name for rule in policy.rules) or "none"
        kept = f"kept in {services.policy.kept_in}" if services.policy.kept_in else "until the next restart"
        until = "as configured" if services.policy.source == "settings" else kept
        summary = f"policy changed: mode {policy.mode}, rules {named}; {until}"
        services.governor.replace_policy(policy.rules, policy.mode, summary, caller=caller)
        services.exporter.counters.policy_changed()
        return JSONResponse(_shown(services))

    return router


def _shown(services: Services) -> dict[str, Any]:
    governor, store = services.governor, services.policy
    decisions = [event for event in services.history.events() if event.kind == "policy" or event.trigger == "policy"]
    return {
        "schema": SCHEMA,
        "mode": governor.mode,
        "rules": [rule.model_dump(mode="json") | {"remedies": rule.ordered_remedies} for rule in governor.rules],
        "source": store.source,
        "kept": store.kept_in is not None,
        "kept_in": store.kept_in,
        "status": _STATUS.dump_python(governor.status(), mode="json"),
        "last_decisions": _EVENTS.dump_python(decisions[:DECISIONS_SHOWN], mode="json"),
    }
