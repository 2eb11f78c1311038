"""Carries one remedy out at a time: what a relief passes through stands in ``states``."""

from __future__ import annotations

from highwater.relief.quiescer import CannotQuiesce, Quiescer
from highwater.relief.relief import Measured, Relief, RemedyObserver, Wish
from highwater.relief.states import State, States

__all__ = ["CannotQuiesce", "Measured", "Quiescer", "Relief", "RemedyObserver", "State", "States", "Wish"]
