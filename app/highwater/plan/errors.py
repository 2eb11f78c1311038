"""The one error of planning: what was asked for cannot be planned, and why."""

from __future__ import annotations

from highwater.errors import HighwaterError


class PlanError(HighwaterError):
    """A plan cannot be made: the message names the key, the value and what would be right."""
