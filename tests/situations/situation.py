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
    """One row.

    Attributes:
        name: As on the command line.
        title: In a line, for the page.
        cards: Each rank's card, in bytes.
        plan: What each rank takes.
        options: What the engine is started with.
        version: vLLM's.
        script: What happens, by seconds from the start of the situation; the engine is ready at 20 s.
        seconds: How long it lasts.
        settings: The sidecar's, beside the defaults.
        tick_seconds: Between two looks at the engine.
        load_seconds: How long the engine loads its model.
        restarts: Whether somebody starts the engine again after it died.
        fits: Whether its traffic is steady and fits.
        may_die: Whether it may die where nothing could be given back.
        most_remedies: How many remedies are due at most.
        needs: At least so many remedies are due.
        cache_counts: Whether encoder outputs are what fills the device.
        served: Through the sidecar clients send images of these sides in pixels, of each of which some must be served.
        refused: Images of these sides the device has no memory for: none may reach the engine.
    """

    name: str
    title: str
    cards: tuple[int, ...]
    plan: Plan
    options: EngineOptions
    version: str
    script: Script
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    tick_seconds: float = 0.25
    load_seconds: float = 20.0
    restarts: bool = True
    fits: bool = False
    may_die: bool = False
    most_remedies: int | None = None
    needs: int = 0
    cache_counts: bool = False
    served: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
