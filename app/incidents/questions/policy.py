"""What the policy had made of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from app.incidents import advice as known
from app.incidents.incident import Evidence, Finding
from app.incidents.latest import Latest
from app.readings import PolicyStatus, RankPressure, RuleStatus

_SHORT = frozenset({"short", "urgent"})


def policy(evidence: Evidence, ranks: Sequence[Latest]) -> Finding | None:
    """Whether the policy knew that memory was short, and what kept it from helping."""
    del ranks
    status = evidence.policy
    if status is None:
        return None
    short = [rule for rule in status.rules if _is_short(rule, status)]
    told = "; ".join(f"{rule.name}: {rule.reason}" for rule in short if rule.reason) or status.summary
    if not short:
        # Of an engine that is gone nothing is known any more: what was said last stands.
        last = _last_shortage(evidence) if status.level in {"held", "unknown"} else None
        if last is None:
            return None
        told = last
    names = f" ({', '.join(rule.name for rule in short)})" if short else ""
    missing = [one for rule in short for one in rule.ranks if one.short_bytes]
    is_helpless = bool(missing) and all(map(_can_give_nothing, missing))
    if status.mode == "observe":
        title = f"the policy saw that memory was short and was set to observe only{names}"
        text = f"In mode observe the policy decides, records, and does nothing. Of the memory it said: {told}."
    else:
        title = f"the policy knew that memory was short{names}"
        text = f"{told}."
    return Finding(
        name="policy",
        weight="clue",
        title=title,
        text=text,
        figures={
            "mode": status.mode,
            "level": status.level,
            "rules_short": len(short),
            "missing_bytes": max((one.short_bytes or 0 for one in missing), default=None),
        },
        # Acting earlier helps only where there is something to give back.
        advice=(known.GPU_MEMORY_UTILIZATION,) if is_helpless else (known.POLICY_EARLIER,),
    )


def _is_short(rule: RuleStatus, status: PolicyStatus) -> bool:
    if rule.phase == "resting":
        return status.level in _SHORT
    return rule.phase in _SHORT or rule.phase == "acting"


def _can_give_nothing(one: RankPressure) -> bool:
    """Whether the workers said that nothing could be given back there."""
    return one.can_release_bytes == 0 and one.can_trim_bytes == 0


def _last_shortage(evidence: Evidence) -> str | None:
    """What the policy said of the memory last, where that was a shortage; decisions come oldest first."""
    levels = [event.summary for event in evidence.decisions if event.summary.startswith("memory: ")]
    level, _, why = levels[-1].partition(" -> ")[2].partition(": ") if levels else ("", "", "")
    return why if level in _SHORT else None
