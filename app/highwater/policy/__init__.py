"""The policy: what is decided from a report and remembered of the engine's life. All but three files are pure.

``rules`` is what an operator may write, ``waters`` where the default rule acts, ``pressure`` how short each rank is by
a rule, ``gains`` what a remedy can give, ``core`` the decision, ``tidying`` that of an idle engine, ``memory`` what is
remembered, ``learning`` how it changes, ``wording`` the reasons. ``governor`` feeds it reports and has its
actions run; ``settings`` and ``store`` hold the policy in force.
"""

from __future__ import annotations

from highwater.policy.core import Action, Decision, decide
from highwater.policy.learning import begin, learn
from highwater.policy.memory import LifeMemory
from highwater.policy.pressure import Facts
from highwater.policy.rules import ALL_REMEDIES, FALLING_SIGNALS, RATIO_SIGNALS, SIGNAL_REMEDIES, Rule

__all__ = [
    "ALL_REMEDIES",
    "FALLING_SIGNALS",
    "RATIO_SIGNALS",
    "SIGNAL_REMEDIES",
    "Action",
    "Decision",
    "Facts",
    "LifeMemory",
    "Rule",
    "begin",
    "decide",
    "learn",
]
