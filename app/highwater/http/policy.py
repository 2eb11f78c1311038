"""``/policy``: the policy as it stands, and changing it."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import TypeAdapter

from highwater.act.rules import PolicyChange
from highwater.http.problems import ProblemAnswer
from highwater.http.services import Admin, Parts, Services, ending, wants_text
from highwater.http.text.control import policy_text
from highwater.model.policy import PolicyStatus
from highwater.model.report import SCHEMA, Event
from highwater.process.errors import OK

DECISIONS_SHOWN: Final = 20
_STATUS: Final = TypeAdapter(PolicyStatus)
_EVENTS: Final = TypeAdapter(list[Event])

router = APIRouter(tags=["control"])


@router.get("/policy")
async def policy(request: Request, parts: Parts) -> Response:
    """Return the rules, where they come from, their state, the last decisions, and whether the caller may act."""
    return _shown(request, parts, caller=parts.control.outcome(request))


@router.put(
    "/policy",
    responses={507: {"model": ProblemAnswer, "description": "The state file could not be written; all is as before"}},
)
async def change_policy(request: Request, parts: Parts, change: PolicyChange, caller: Admin) -> Response:
    """Replace the mode, the rules or both; validated whole, kept, and recorded.

    A rule whose waters this engine is known to be unable to reach at rest is refused.
    """
    parts.governor.check(change.rules or ())
    changed = await parts.policy.change(change)
    named = ", ".join(rule.name for rule in changed.rules) or "none"
    kept = f"kept in {parts.policy.kept_in}" if parts.policy.kept_in else "until the next restart"
    until = "as configured" if parts.policy.source == "settings" else kept
    summary = f"policy changed: mode {changed.mode}, rules {named}; {until}"
    parts.governor.replace_policy(changed.rules, changed.mode, summary, caller=caller)
    parts.exporter.counters.policy_changed()
    return _shown(request, parts)


def _shown(request: Request, services: Services, **more: str) -> Response:
    governor, store, status = services.governor, services.policy, services.governor.status()
    decisions = [event for event in services.history.events() if event.kind == "policy" or event.trigger == "policy"]
    decisions = decisions[:DECISIONS_SHOWN]
    if wants_text(request):
        return PlainTextResponse(policy_text(status, governor.rules, store, decisions), headers=ending(OK))
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "mode": governor.mode,
        "rules": [rule.model_dump(mode="json") | {"remedies": rule.ordered_remedies} for rule in governor.rules],
        "source": store.source,
        "kept": store.kept_in is not None,
        "kept_in": store.kept_in,
        "status": _STATUS.dump_python(status, mode="json"),
        "last_decisions": _EVENTS.dump_python(decisions, mode="json"),
    }
    return JSONResponse(answer | more, headers=ending(OK))
