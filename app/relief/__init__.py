"""Carries one remedy out at a time: what a relief passes through stands in ``states``."""

from __future__ import annotations

from app.relief.quiescer import CannotQuiesce, Quiescer
from app.relief.relief import Measured, Relief, RemedyObserver, Wish
from app.relief.states import State, States

__all__ = ["CannotQuiesce", "Measured", "Quiescer", "Relief", "RemedyObserver", "State", "States", "Wish"]
