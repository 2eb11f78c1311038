"""The policy: what it knew, and what kept it from helping. Pure."""

from __future__ import annotations

from typing import Final

from highwater.accounting.remedies import gains
from highwater.diagnose.case import Case
from highwater.diagnose.evidence import Evidence
from highwater.diagnose.finding import Finding, finding

# Levels at which the policy knows nothing of the memory.
NOTHING_KNOWN: Final = frozenset({"held", "unknown"})


def policy(case: Case, evidence: Evidence) -> Finding | None:
    status, before = evidence.policy, evidence.policy_before
    if status is None or (status.level in NOTHING_KNOWN and before is not None):
        status = before  # once the engine is gone the policy knows nothing
    short = [] if status is None else [rule for rule in status.rules if rule.is_short(status.level)]
    if status is None or not short:
        return None
    missing = [one for rule in short for one in rule.ranks if one.short_bytes]
    is_helpless = bool(missing) and all(size == 0 for one in missing for size in gains(one).values())
    return finding(
        "policy",
        # Acting earlier helps only where there is something to give back.
        advice=("gpu_memory_utilization",) if is_helpless else ("policy_earlier",),
        status=status,
        rules_short=len(short),
        missing_bytes=max((one.short_bytes or 0 for one in missing), default=None),
        only_observed=status.mode == "observe",
        rules=", ".join(rule.name for rule in short),
        reasons="; ".join(f"{rule.name}: {rule.reason}" for rule in short if rule.reason) or status.summary,
    )
