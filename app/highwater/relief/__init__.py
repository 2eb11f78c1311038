"""Runs one remedy at a time; ``states`` draws what a relief passes through."""

from __future__ import annotations

from highwater.relief.quiescer import CannotQuiesce, Quiescer
from highwater.relief.relief import Relief, RemedyObserver, RemedyOutcome, RemedyRequest
from highwater.relief.states import State, States

__all__ = ["CannotQuiesce", "Quiescer", "Relief", "RemedyObserver", "RemedyOutcome", "RemedyRequest", "State", "States"]
