"""The interface of every source of readings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from highwater.engine.capabilities import Capabilities
from highwater.readings import EngineLoad, WorkerMemory

# Who has to answer: the API server alone; the engine's loop too, between two steps; or the workers, which spin on a
# core for a second after each call.
Reach: TypeAlias = Literal["api_server", "engine", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The observations of one source; ``None`` where it reports nothing.

    Attributes:
        workers: Each worker's memory, in rank order.
        load: The engine's own counts.
        paused: Whether the scheduler is paused.
    """

    workers: tuple[WorkerMemory, ...] | None = None
    load: EngineLoad | None = None
    paused: bool | None = None


class Source(Protocol):
    """One place where readings come from. A source that fails costs only itself."""

    @property
    def name(self) -> str:
        """A bounded word, the ``source`` label of ``highwater_poll_failures_total``."""

    @property
    def reach(self) -> Reach:
        """The part of the engine that has to respond for it to be read."""

    def available(self, capabilities: Capabilities) -> bool:
        """Return whether this engine has it."""

    async def read(self) -> Observation:
        """Ask once.

        Raises:
            EngineError: It could not be asked, or did not answer as it should.
        """
