"""What the policy had made of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import Latest


def policy(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether the policy knew that memory was short, and what kept it from helping."""
    del ranks
    status = evidence.policy
    if status is None:
        return None
    short = [rule for rule in status.rules if rule.phase in {"short", "urgent", "acting", "resting"}]
    names = ", ".join(rule.name for rule in short)
    if short and status.mode == "observe":
        title = f"the policy saw that memory was short and was set to observe only ({names})"
        text = "In mode observe the policy decides, records, and does nothing."
    elif short:
        title = f"the policy knew that memory was short ({names})"
        text = "; ".join(f"{rule.name}: {rule.reason}" for rule in short if rule.reason) or status.summary
        text = f"{text}."
    else:
        return None
    return Finding(
        name="policy",
        weight="clue",
        title=title,
        text=text,
        figures={"mode": status.mode, "level": status.level, "rules_short": len(short)},
        advice=(known.POLICY_EARLIER,),
    )
