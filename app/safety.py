"""Which moment harms nobody: the pure choice, by what a remedy needs and what this engine can do.

What the choice rests on is in ``docs/engine.md``, "Pausing" and "Resets". Never chosen on any version: ``/sleep``,
``/abort_requests``, ``reset_running_requests`` and a pause that clears caches; each harms requests or the engine.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from app.capabilities import Capabilities
from app.readings import Moment

# What must be still: nothing; the engine (new requests may queue in it); everything between the client and the engine,
# as a request on its way already counts on what the remedy takes away.
Need: TypeAlias = Literal["nothing", "idle engine", "idle path"]


def choose_moment(need: Need, capabilities: Capabilities, *, may_pause: bool) -> Moment:
    """How to make the moment that a remedy needs.

    Args:
        need: What must be still.
        capabilities: What the engine can do.
        may_pause: Whether a pause would be undone also after the sidecar's own death.
    """
    if need == "nothing":
        return "any"
    return "pause" if need == "idle engine" and may_pause and pause_harms_nobody(capabilities) else "gate"


def pause_harms_nobody(capabilities: Capabilities) -> bool:
    """Whether ``POST /pause`` lets running requests finish and makes new ones wait, all of them."""
    if capabilities.pause is None or not capabilities.at_least("0.12"):
        return False
    if capabilities.at_least("0.33"):
        return False  # new requests are answered with 503 meanwhile
    if capabilities.data_parallel != 1:
        return False  # resuming while the engines still agree on the pause raises in all of them
    # Up to 0.16 the pause is a flag in the API process that was asked.
    return capabilities.at_least("0.17") or capabilities.api_processes == 1
