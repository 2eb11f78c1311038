"""A running engine explained, with what the rule book makes of it: what ``GET /memory/budget`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from highwater.findings.budget import budget_findings
from highwater.findings.finding import Finding
from highwater.plan.explanation import Explanation
from highwater.readings import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The answer.

    Attributes:
        schema: Of its form.
        taken_at: When the readings in it were taken, in Unix seconds; ``None`` before the first.
        engine_state: The engine's state then.
        explanation: Budgets, pools, encoder.
        findings: What is missed or contradicts itself, and what to change.
    """

    schema: int = SCHEMA
    taken_at: float | None = None
    engine_state: str | None = None
    explanation: Explanation
    findings: tuple[Finding, ...] = ()


def explained(explanation: Explanation, *, taken_at: float | None = None, engine_state: str | None = None) -> Explained:
    """Judge an explanation by the rule book."""
    return Explained(
        taken_at=taken_at, engine_state=engine_state, explanation=explanation, findings=budget_findings(explanation)
    )
