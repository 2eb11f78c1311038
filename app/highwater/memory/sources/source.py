"""The interface of every source of readings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.readings.engine import EngineLoad
from highwater.readings.rank import WorkerMemory

# The part of the engine that has to respond: the API server alone; the engine's loop too, between two steps; or the
# workers, which spin on a core for a second after each call.
Reach: TypeAlias = Literal["api_server", "engine", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The observations of one source; ``None`` where it reports nothing."""

    workers: tuple[WorkerMemory, ...] | None = None  # each worker's memory, in rank order
    load: EngineLoad | None = None  # the engine's own counts
    paused: bool | None = None  # whether the scheduler is paused


class Source(ABC):
    """A source of readings. A source that fails costs only itself."""

    name: ClassVar[str]  # the `source` label of `highwater_poll_failures_total`
    reach: ClassVar[Reach] = "api_server"  # the part of the engine that has to respond

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def available(self, capabilities: Capabilities) -> bool:
        del capabilities
        return True

    @abstractmethod
    async def read(self) -> Observation:
        """Read it once. Raises EngineError: no valid response."""
