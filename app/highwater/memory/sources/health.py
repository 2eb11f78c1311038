"""Asks the engine's API server whether it and its engine are there."""

from __future__ import annotations

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.memory.sources.source import Observation, Reach


class Health:
    """``GET /health``, the cheapest question there is: asked where the engine's counts are not."""

    name = "health"
    reach: Reach = "api_server"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def available(self, capabilities: Capabilities) -> bool:
        """Every vLLM has it."""
        del capabilities
        return True

    async def read(self) -> Observation:
        """Ask once.

        Raises:
            EngineError: No good answer.
        """
        await self._engine.get_text("/health")
        return Observation()
