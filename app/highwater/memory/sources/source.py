"""The interface of every source of readings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from highwater.engine.capabilities import Capabilities
from highwater.readings import EngineLoad, WorkerMemory


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
    def wakes_engine(self) -> bool:
        """True if reading it wakes more than the API server, which is not free on an idle engine."""

    def available(self, capabilities: Capabilities) -> bool:
        """Return whether this engine has it."""

    async def read(self) -> Observation:
        """Ask once.

        Raises:
            EngineError: It could not be asked, or did not answer as it should.
        """
