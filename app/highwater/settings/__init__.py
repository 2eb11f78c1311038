"""The settings: what there is to set, and where the values come from."""

from __future__ import annotations

from highwater.policy.settings import PolicySettings
from highwater.settings.keys import PREFIX, is_list, keys, variable
from highwater.settings.sections import GateSettings
from highwater.settings.settings import Settings

__all__ = ["PREFIX", "GateSettings", "PolicySettings", "Settings", "is_list", "keys", "variable"]
