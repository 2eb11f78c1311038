"""The policy: what is decided from a report and what is remembered of the engine's life; all but three files pure.

``rules`` is what an operator may write, ``waters`` where the default rule acts, ``pressure`` how each rank stands to a
rule, ``gains`` what a remedy can give and gave, ``core`` the decision. ``governor`` hands it reports and has its
actions carried out, ``settings`` and ``store`` hold what is in force.
"""

from __future__ import annotations

from highwater.policy.core import Action, Decision, LastRun, LifeMemory, RuleMemory, RuleView, begin, decide, learn
from highwater.policy.pressure import Facts, Pressure, is_reached, pressures, unreachable
from highwater.policy.rules import ALL_REMEDIES, FALLING_SIGNALS, RATIO_SIGNALS, SIGNAL_REMEDIES, Rule
from highwater.readings import PolicyMode

__all__ = [
    "ALL_REMEDIES",
    "FALLING_SIGNALS",
    "RATIO_SIGNALS",
    "SIGNAL_REMEDIES",
    "Action",
    "Decision",
    "Facts",
    "LastRun",
    "LifeMemory",
    "PolicyMode",
    "Pressure",
    "Rule",
    "RuleMemory",
    "RuleView",
    "begin",
    "decide",
    "is_reached",
    "learn",
    "pressures",
    "unreachable",
]
