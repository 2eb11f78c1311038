"""What the policy had made of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import Latest


def policy(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether the policy had tried in vain, or was not allowed to try."""
    del ranks
    status = evidence.policy
    if status is None:
        return None
    futile = [rule.name for rule in status.rules if rule.phase == "futile"]
    above = [rule.name for rule in status.rules if rule.phase == "above"]
    if futile:
        title = f"the policy could not help any more ({', '.join(futile)})"
        text = "The remedies of these rules had been tried and freed too little: what filled the memory was not theirs."
    elif above and status.mode == "observe":
        title = f"the policy saw it and was told to observe only ({', '.join(above)})"
        text = "These rules were over their high water. In mode observe the policy decides, records, and does nothing."
    else:
        return None
    return Finding(
        name="policy",
        weight="clue",
        title=title,
        text=text,
        figures={"mode": status.mode, "futile_rules": len(futile), "rules_above": len(above)},
        advice=(known.POLICY_EARLIER,),
    )
