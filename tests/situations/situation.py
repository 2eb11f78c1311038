"""One situation: an engine on a device, what happens to it and when, and what is to be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.situations.clients import Clients
from tests.situations.clock import VirtualLoop
from tests.situations.device import Plan
from tests.situations.engine import EngineModel
from tests.situations.worker import EngineOptions


@dataclass(frozen=True, slots=True)
class Stage:
    """The objects that a situation's events act on."""

    engine: EngineModel
    loop: VirtualLoop | None
    clients: Clients | None = None

    def set_wall_clock(self, seconds: float) -> None:
        """Set the machine's wall clock forward; only where time is virtual."""
        assert self.loop is not None, "nobody sets the clock of the machine that this runs on"
        self.loop.wall_offset += seconds


Event: TypeAlias = Callable[[Stage], None]
Script: TypeAlias = tuple[tuple[float, Event], ...]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One row."""

    name: str  # as on the command line
    title: str  # in a line, for the page
    cards: tuple[int, ...]  # each rank's card, in bytes
    plan: Plan  # what each rank takes
    options: EngineOptions  # what the engine is started with
    version: str  # vLLM's
    script: Script  # what happens, by seconds from the start of the situation; the engine is ready at 20 s
    seconds: float  # how long it lasts
    settings: Mapping[str, Any] = field(default_factory=dict)  # the sidecar's, beside the defaults
    tick_seconds: float = 0.25  # between two looks at the engine
    load_seconds: float = 20.0  # how long the engine loads its model
    restarts: bool = True  # whether somebody starts the engine again after it died
    fits: bool = False  # whether its traffic is steady and fits
    may_die: bool = False  # whether it may die where nothing could be given back
    most_remedies: int | None = None  # how many remedies are due at most
    needs: int = 0  # at least so many remedies are due
    cache_counts: bool = False  # whether encoder outputs are what fills the device
    # Through the sidecar clients send images of these sides in pixels, of each of which some must be served.
    served: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()  # images of these sides the device has no memory for: none may reach the engine
